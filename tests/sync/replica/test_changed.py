"""Waiting for another thread: no change is missed, and an interrupt anywhere leaves the lock free."""

from __future__ import annotations

import gc
import signal
import threading
from types import FrameType

from ftopt.sync.replica.changed import Changed

LIMIT_S = 30.0


def test_a_change_ends_the_wait() -> None:
    changed, values = Changed(), list[int]()

    def change() -> None:
        for value in range(1000):
            with changed.lock:
                values.append(value)
            changed.notify_all()

    thread = threading.Thread(target=change)
    thread.start()
    for count in (1, 10, 999, 1000):
        assert changed.wait_for(lambda count=count: len(values) >= count, LIMIT_S)
    thread.join()


def test_what_does_not_come_is_waited_for_until_the_time_is_over() -> None:
    assert not Changed().wait_for(lambda: False, 0.0)
    assert not Changed().wait_for(lambda: False, 0.01)


def test_interrupts_at_any_moment_leave_the_lock_free() -> None:
    """`threading.Condition` in its place keeps its lock after a few of these."""
    changed, interrupts = Changed(), 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # what a finalizer raises ends nothing, and there is one interrupt at a time
    try:
        while interrupts < 3000:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + interrupts % 7 * 1e-5)
                while True:
                    with changed.lock:
                        pass
                    changed.wait_for(lambda: False, 0.0)
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    free: list[bool] = []
    other = threading.Thread(target=lambda: free.append(changed.lock.acquire(timeout=LIMIT_S)))
    other.start()
    other.join()
    assert free == [True]
