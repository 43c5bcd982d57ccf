"""How a process of a run ends: on a signal, or because its runner has ended.

The runner holds the write end of the child's standard input. Its end means *finish up*: the runner says so at the end
of a run, and the kernel says so when the runner is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def finish_up(patience_s: float) -> threading.Event:
    """Returns an event that is set once standard input has ended; ``patience_s`` later the process ends, whatever it is
    doing."""
    asked = threading.Event()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        asked.set()
        time.sleep(patience_s)
        os._exit(1)

    threading.Thread(target=watch, name="ftopt-finish-up", daemon=True).start()
    return asked


def terminate_self(asked: threading.Event, after_s: float = 0.0) -> None:
    """Sends this process SIGTERM ``after_s`` after ``asked`` is set: for a process that knows how to leave."""

    def wait() -> None:
        asked.wait()
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="ftopt-terminate", daemon=True).start()


class Ended(KeyboardInterrupt):
    """A signal ends this process at once. Exit status 128 + ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def on_signals(handle: Callable[[int], object]) -> Iterator[None]:
    """Calls ``handle`` with the signal on SIGTERM and Ctrl-C in the block."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
