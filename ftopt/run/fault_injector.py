"""Injects faults into this process at events: a fault point *is* an event, emitted just before its effect."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ftopt.events import Event, OnEvent
from ftopt.run.fault_spec import COORDINATOR, Fault

Action = Callable[[Fault, Event], None]
"""Carries out a fault in this process, at the event where it strikes."""


@dataclass(slots=True)
class _Waiting:
    """A fault, the number of events at which it could strike, and its strikes so far."""

    fault: Fault
    events: int = 0
    strikes: int = 0


class FaultInjector:
    """Subscribes to the events of one process and carries out its faults. Any thread; made on the training thread.

    Args:
        faults: the faults that aim at this process.
        on_event: called with a ``fault`` event before each strike, to record it.
        incarnation: this process' incarnation; None takes it from each event.
        sleep: blocks the calling thread for a number of seconds.
        clock: seconds, monotonic.

    Actions that need objects of the process (``partition``, ``corrupt``, ``nan``) are added by `learn` once these
    exist.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        on_event: OnEvent,
        *,
        incarnation: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = [_Waiting(fault) for fault in faults]
        self._told: set[Fault] = set()
        self._actions: dict[str, Action] = {
            "kill": lambda fault, event: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda fault, event: stop_for(fault.for_s or 0.0),
            "hang": self._hang,
            "slow": self._slow_down,
        }
        self._on_event = on_event
        self._incarnation = incarnation
        self._training_thread = threading.get_ident()
        self._sleep = sleep
        self._lock = threading.Lock()
        self._clock = clock
        self._hang_s = 0.0
        self._inner_step = 0
        self._factor = 1.0
        self._slow_until_s = 0.0
        self._stepped_s: float | None = None

    def learn(self, actions: Mapping[str, Action]) -> None:
        """Adds actions, by the value of a fault's ``do``."""
        self._actions |= actions

    def add(self, fault: Fault) -> None:
        """Adds a fault to wait for. Any thread."""
        with self._lock:
            self._waiting.append(_Waiting(fault))

    def strike(self, fault: Fault, event: Event) -> None:
        """Strikes at ``event``, even if the fault waits for another one. Any thread."""
        if fault not in self._told:
            self._on_event(_on_record(fault, event))
        if fault.times is None:  # recording each strike would write more than the training does
            self._told.add(fault)
        self._actions[fault.do](fault, event)

    def __call__(self, event: Event) -> None:
        """Strikes if a fault is due at this event; the event takes effect afterwards."""
        if event.event == "stepped" and self._factor > 1:
            self._drag()
        if not self._waiting and not self._hang_s:
            return
        for fault in self._due(event):
            self.strike(fault, event)
        if threading.get_ident() == self._training_thread:
            with self._lock:
                hang_s, self._hang_s = self._hang_s, 0.0
            if hang_s:
                self._sleep(hang_s)

    def _due(self, event: Event) -> list[Fault]:
        life = self._incarnation if self._incarnation is not None else event.incarnation
        with self._lock:
            if event.inner_step is not None:
                self._inner_step = event.inner_step  # Events of other threads lack it.
            due = [waiting for waiting in self._waiting if self._matches(waiting, event, life)]
            for waiting in due:
                waiting.strikes += 1
            self._waiting = [w for w in self._waiting if w.fault.times is None or w.strikes < w.fault.times]
        return [waiting.fault for waiting in due]

    def _matches(self, waiting: _Waiting, event: Event, life: int) -> bool:
        fault = waiting.fault
        if event.event != fault.point or life != fault.incarnation:
            return False
        # A newcomer that fetches has no inner step yet.
        if self._inner_step < fault.at_step and not (fault.point == "fetch" and not self._inner_step):
            return False
        waiting.events += 1
        return (waiting.events - 1) % fault.every == 0

    def _hang(self, fault: Fault, event: Event) -> None:
        with self._lock:
            self._hang_s += fault.for_s or 0.0

    def _slow_down(self, fault: Fault, event: Event) -> None:
        self._factor, self._stepped_s = fault.factor or 1.0, None
        self._slow_until_s = self._clock() + fault.for_s if fault.for_s is not None else math.inf

    def _drag(self) -> None:
        """Waits after an inner step until it has taken ``factor`` times its time."""
        now_s = self._clock()
        if now_s >= self._slow_until_s:
            self._factor = 1.0
            return
        if self._stepped_s is not None:
            self._sleep((now_s - self._stepped_s) * (self._factor - 1))
        self._stepped_s = self._clock()


def stop_for(seconds: float) -> None:
    """Stops this whole process; a helper process continues it after ``seconds``, unless somebody has done so before."""
    waker = subprocess.Popen(
        # Repeats until it is ended: the first signal may come before the stop.
        ["/bin/sh", "-c", f"sleep {seconds:g}; while kill -CONT {os.getpid()}; do sleep 0.1; done"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # Sent to this thread, which is stopped when the call returns: a signal to the process may reach another thread
    # first, and this one would end the helper too early.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    with suppress(ProcessLookupError):
        os.killpg(waker.pid, signal.SIGKILL)
    waker.wait()


def _on_record(fault: Fault, event: Event) -> Event:
    fields = ("do", "point", "for_s", "rejoin_s", "journal", "factor")
    data = {name: getattr(fault, name) for name in fields} | {"what": fault.aim or None}
    if fault.replica == COORDINATOR:  # its events are often about replicas
        event = replace(event, replica=COORDINATOR, incarnation=0)
    return replace(event, event="fault", data=data)
