"""How a process of a run ends: on a signal, or because its runner has ended.

The runner holds the write end of the child's standard input. Its end-of-file means *finish up*: the runner closes it at
the end of a run, and the kernel does when the runner is killed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

_LOOK_S = 0.25


def finish_up(
    patience_s: float, *, orphaned_s: float = math.inf, heard: Callable[[str], object] = lambda line: None
) -> threading.Event:
    """Returns an event that is set when standard input ends. ``patience_s`` later (or ``orphaned_s``, if it ended
    because the parent process died) the process ends, whatever it is doing. ``heard``: called with each line before, on
    a thread of its own."""
    asked, parent = threading.Event(), os.getppid()

    def watch() -> None:
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
            for line in lines:  # not those of `sys.stdin`, whose lock the process needs at its end
                heard(line.decode().rstrip("\n"))
        asked.set()
        ended_s = time.monotonic()
        while time.monotonic() - ended_s < (patience_s if os.getppid() == parent else min(patience_s, orphaned_s)):
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="ftopt-finish-up", daemon=True).start()
    return asked


def terminate_self(asked: threading.Event, after_s: float = 0.0) -> None:
    """Sends this process SIGTERM ``after_s`` after ``asked`` is set, for a process that leaves on it."""

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


def ended_by(number: int) -> NoReturn:
    """Raises `Ended`."""
    raise Ended(number)


@contextmanager
def on_signals(handle: Callable[[int], object], *, behind: signal.Handlers | None = None) -> Iterator[None]:
    """Calls ``handle`` with the signal on SIGTERM and Ctrl-C in the block. ``behind``: their handler after the block;
    None restores the former ones."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, behind or handler or signal.SIG_DFL)
