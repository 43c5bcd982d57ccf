"""A condition variable that stays usable after Ctrl-C, whenever that comes.

`threading.Condition` is Python code: an interrupt within its ``__enter__`` or ``__exit__``, or while its ``wait``
returns the lock, leaves the lock held forever, and the network thread then waits for it. Here only a built-in lock is
held (`with` takes and returns it in one step), and none while waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import RLock


class Changed:
    """Use ``with changed.lock`` around each change, and `notify_all` after it."""

    def __init__(self) -> None:
        self.lock = RLock()
        self._waiters: list[SimpleQueue[None]] = []

    def notify_all(self) -> None:
        """Makes all waiting threads look again. Any thread, with the lock or without."""
        for waiter in tuple(self._waiters):
            if waiter.empty():
                waiter.put(None)

    def wait_for(self, true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until ``true()``, which is called with the lock held; False after ``timeout_s``. Call it without the
        lock."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        waiter = SimpleQueue[None]()
        self._waiters.append(waiter)  # before the first look: no change goes unnoticed
        try:
            while True:
                with self.lock:
                    if true():
                        return True
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                with contextlib.suppress(Empty):
                    waiter.get(timeout=left_s)
        finally:
            self._waiters.remove(waiter)
