"""Strikes this process at an event: a fault point *is* an event, told just before its effect."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from ftopt.events import Event, OnEvent
from ftopt.faults.spec import Fault


class FaultInjector:
    """Subscribes to the events of one process and strikes each of its faults once. Any thread.

    Args:
        faults: those that aim at this process.
        on_event: is told ``fault`` before the strike, so that it is on record.
        incarnation: the life of this process; None takes it from each event.
        training_thread: ident of the thread that trains; default: the one that makes this object.
        sleep: blocks the calling thread for that many seconds.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        on_event: OnEvent,
        *,
        incarnation: int | None = None,
        training_thread: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._waiting = list(faults)
        self._on_event = on_event
        self._incarnation = incarnation
        self._training_thread = training_thread if training_thread is not None else threading.get_ident()
        self._sleep = sleep
        self._lock = threading.Lock()
        self._hang_s = 0.0
        self._inner_step = 0

    def __call__(self, event: Event) -> None:
        """Strikes when a fault's moment has come; then the event takes effect."""
        if not self._waiting and not self._hang_s:
            return
        struck = self._due(event)
        for fault in struck:
            self._strike(fault, event)
        if threading.get_ident() == self._training_thread:
            with self._lock:
                hang_s, self._hang_s = self._hang_s, 0.0
            if hang_s:
                self._sleep(hang_s)

    def _due(self, event: Event) -> list[Fault]:
        life = self._incarnation if self._incarnation is not None else event.incarnation
        with self._lock:
            if event.inner_step is not None:
                self._inner_step = event.inner_step  # Events off the training thread do not know it.
            due = [fault for fault in self._waiting if _matches(fault, event, life, self._inner_step)]
            self._waiting = [fault for fault in self._waiting if fault not in due]
        return due

    def _strike(self, fault: Fault, event: Event) -> None:
        data = {
            "do": fault.do,
            "point": fault.point,
            "for_s": fault.for_s,
            "rejoin_s": fault.rejoin_s,
            "journal": fault.journal,
        }
        self._on_event(
            Event(
                "fault",
                event.replica,
                event.incarnation,
                fragment=event.fragment,
                version=event.version,
                attempt=event.attempt,
                inner_step=event.inner_step,
                data=data,
            )
        )
        if fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.do == "stop":
            assert fault.for_s is not None
            stop_for(fault.for_s)
        else:
            assert fault.for_s is not None
            with self._lock:
                self._hang_s += fault.for_s


def stop_for(seconds: float) -> None:
    """Stops this whole process; a process of its own lets it go on after ``seconds``."""
    waker = subprocess.Popen(
        ["/bin/sh", "-c", f"sleep {seconds:g}; kill -CONT {os.getpid()}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def _matches(fault: Fault, event: Event, life: int, inner_step: int) -> bool:
    if event.event != fault.point or life != fault.incarnation:
        return False
    if fault.point == "fetch" and not inner_step:
        return True  # A newcomer has no inner step yet to wait for.
    return inner_step >= fault.at_step
