"""The one fork server of all tests. It has loaded what the processes need: four start in 35 ms instead of seconds.

One for all: the last list that is set decides what is preloaded for everybody.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # an inner optimizer imports it: seconds for each process
        "torch.distributed",
        "tests.sync.processes.job",
        "tests.transport.helpers",
        "ftopt.transport.gloo",
        "ftopt.transport.state_transfer",
        "ftopt.transport.state_server",
        "ftopt.transport.state_transfer",
        "ftopt.sync.replica.client",
        "ftopt.sync.replica.websocket",
        "aiohttp",
        "encodings.idna",
    ]
)


class Flag:
    """An event between processes of which any may be killed while it waits. `multiprocessing.Event.set` would wait for
    that one for ever, and whoever is killed as it reads a `multiprocessing.Value` keeps its lock."""

    def __init__(self) -> None:
        self._value = CONTEXT.RawValue("b", 0)

    def set(self) -> None:
        self._value.value = 1

    def is_set(self) -> bool:
        return bool(self._value.value)

    def wait(self, limit_s: float) -> bool:
        """Whether it is set, within ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while not self.is_set() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.is_set()


def die_with_parent() -> None:
    """From now on this process is killed when the one that asked for it ends, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_after, args=(parent.sentinel,), daemon=True).start()


def _die_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
