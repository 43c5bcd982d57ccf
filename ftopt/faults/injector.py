"""Injects faults into this process at events: a fault point *is* an event, emitted just before its effect."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ftopt.events import Event, OnEvent
from ftopt.faults.spec import COORDINATOR, Fault

Action = Callable[[Fault, Event], None]
"""Carries out a fault in this process, at the event where it strikes."""


class FaultInjector:
    """Subscribes to the events of one process and carries out its faults. Any thread.

    Args:
        faults: the faults that aim at this process.
        on_event: called with a ``fault`` event before the strike, so that it is on record.
        incarnation: the incarnation of this process; None takes it from each event.
        training_thread: ident of the training thread; default: the thread that makes this object.
        sleep: blocks the calling thread for that many seconds.
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
        training_thread: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = list(faults)
        self._left = [_strikes(fault) for fault in faults]
        self._seen: Counter[int] = Counter()
        self._told: set[Fault] = set()
        self._actions: dict[str, Action] = {
            "kill": lambda fault, event: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda fault, event: stop_for(fault.for_s or 0.0),
            "hang": self._hang,
            "slow": self._slow_down,
        }
        self._on_event = on_event
        self._incarnation = incarnation
        self._training_thread = training_thread if training_thread is not None else threading.get_ident()
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
            self._waiting.append(fault)
            self._left.append(_strikes(fault))

    def strike(self, fault: Fault, event: Event) -> None:
        """Strikes at ``event``, even if the fault waits for another. Any thread."""
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
        struck = self._due(event)
        for fault in struck:
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
                self._inner_step = event.inner_step  # Events off the training thread do not know it.
            struck = [self._matches(fault, event, life) for fault in self._waiting]
            due = [fault for fault, hit in zip(self._waiting, struck, strict=True) if hit]
            left = [(f, n - hit) for f, n, hit in zip(self._waiting, self._left, struck, strict=True) if n > hit]
            self._waiting, self._left = [f for f, _ in left], [n for _, n in left]
        return due

    def _matches(self, fault: Fault, event: Event, life: int) -> bool:
        if event.event != fault.point or life != fault.incarnation:
            return False
        # A newcomer has no inner step yet to wait for.
        if self._inner_step < fault.at_step and not (fault.point == "fetch" and not self._inner_step):
            return False
        self._seen[id(fault)] += 1
        return (self._seen[id(fault)] - 1) % fault.every == 0

    def _hang(self, fault: Fault, event: Event) -> None:
        with self._lock:
            self._hang_s += fault.for_s or 0.0

    def _slow_down(self, fault: Fault, event: Event) -> None:
        self._factor, self._stepped_s = fault.factor or 1.0, None
        self._slow_until_s = self._clock() + fault.for_s if fault.for_s is not None else math.inf

    def _drag(self) -> None:
        """Waits after an inner step until it has taken ``factor`` times as long."""
        now_s = self._clock()
        if now_s >= self._slow_until_s:
            self._factor = 1.0
            return
        if self._stepped_s is not None:
            self._sleep((now_s - self._stepped_s) * (self._factor - 1))
        self._stepped_s = self._clock()


def stop_for(seconds: float) -> None:
    """Stops this whole process; a helper process continues it after ``seconds``."""
    waker = subprocess.Popen(
        ["/bin/sh", "-c", f"sleep {seconds:g}; kill -CONT {os.getpid()}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def _on_record(fault: Fault, event: Event) -> Event:
    data = {
        "do": fault.do,
        "point": fault.point,
        "for_s": fault.for_s,
        "rejoin_s": fault.rejoin_s,
        "journal": fault.journal,
        "what": fault.aim or None,
        "factor": fault.factor,
    }
    if fault.replica == COORDINATOR:  # its events are often about a replica
        event = replace(event, replica=COORDINATOR, incarnation=0)
    return replace(event, event="fault", data=data)


def _strikes(fault: Fault) -> float:
    return math.inf if fault.times is None else fault.times
