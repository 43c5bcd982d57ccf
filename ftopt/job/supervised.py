"""How a process of a run ends: on a signal, or because its runner has ended.

The runner holds the write end of the child's standard input. Its end means *finish up*: the runner says so at the end
of a run, and the kernel says so when the runner is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class FinishUp:
    """Set once standard input has ended; the process then has ``patience_s`` to end on its own.

    Args:
        patience_s: seconds after which the process is ended, whatever it is doing.
    """

    def __init__(self, patience_s: float) -> None:
        self.asked = threading.Event()
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._then: Callable[[], None] | None = None
        threading.Thread(target=self._watch, name="ftopt-finish-up", daemon=True).start()

    def on_asked(self, then: Callable[[], None]) -> None:
        """Calls ``then`` when standard input ends, or now when it has ended."""
        with self._lock:
            self._then = then
            asked = self.asked.is_set()
        if asked:
            then()

    def _watch(self) -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        with self._lock:
            self.asked.set()
            then = self._then
        if then is not None:
            then()
        threading.Event().wait(self._patience_s)
        os._exit(1)


def terminate_self(after_s: float = 0.0) -> None:
    """SIGTERM to this process, after some seconds: for those that know how to leave."""
    threading.Event().wait(after_s)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def on_signals(handle: Callable[[], None]) -> Iterator[None]:
    """Calls ``handle`` on SIGTERM and Ctrl-C in the block."""
    before = {number: signal.signal(number, lambda *_: handle()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
