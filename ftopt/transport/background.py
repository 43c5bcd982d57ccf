"""Threads that put process groups together and away; Gloo does both in calls that may last."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

_EXIT_S = 3.0
_running: set[threading.Thread] = set()
_unstarted: list[Callable[[], None]] = []


def in_background(work: Callable[[], None], name: str) -> None:
    """Does ``work`` on a daemon thread of that name."""

    def run() -> None:
        try:
            work()
        finally:
            _running.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running.add(thread)
    try:
        thread.start()
    except RuntimeError:  # no new threads, the interpreter is ending; what `work` holds lives on with it
        _unstarted.append(work)


@atexit.register
def _finish_background() -> None:
    """A thread that comes back from Gloo while the interpreter ends would abort the process: waits for it, 3 s."""
    end_s = time.monotonic() + _EXIT_S
    for thread in list(_running):
        if thread.ident is not None:
            thread.join(max(0.0, end_s - time.monotonic()))
