"""Real jobs of the three kinds, and the schedule played on all of them at the same time."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.goodput.replica import replica
from benchmarks.goodput.schedule import KILL, START, Deed
from benchmarks.speed.theirjob import TheirJob
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import JsonLines
from tests.forkserver import CONTEXT
from tests.sync.processes.job import TinyJob

_END_S = 60.0


class Job(Protocol):
    """What the schedule does to a job. ``odd``: what happened that should not, by kind."""

    odd: Counter[str]

    def start(self, name: str) -> Any:
        """A machine's process is started."""

    def warn(self, name: str) -> None:
        """The machine goes soon."""

    def remove(self, name: str) -> None:
        """The machine is gone."""

    def tend(self) -> None:
        """Between two deeds."""

    def wait_ready(self) -> None:
        """Until the processes of the first machines are there."""


class OurJob(TinyJob):
    """A job of ftopt. Replicas leave by SIGTERM where a notice comes, and die by SIGKILL."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.odd: Counter[str] = Counter()
        self.go = CONTEXT.Event()
        self.spawned: dict[str, list[float]] = {name: [] for name in self.names}
        self._joins: Counter[str] = Counter()
        self._warned: set[str] = set()

    def start(self, name: str, **options: Any) -> Any:
        self.spawned[name].append(time.time() - self.started)
        self._joins[name] = len(self.events("join", name))
        self._warned.discard(name)
        args = (self.folder, self.url, name, self.started, {**self.options, **options}, self.go, self.finish)
        return self._start(name, replica, args)

    def warn(self, name: str) -> None:
        pid = self.processes[name].pid
        assert pid is not None
        self._warned.add(name)
        if self.processes[name].is_alive():
            os.kill(pid, signal.SIGTERM)

    def remove(self, name: str) -> None:
        process = self.processes.pop(name)
        left = process.exitcode
        if left is None:
            self.odd["killed after a notice"] += name in self._warned
            process.kill()
            process.join(_END_S)
        elif left not in (0, -signal.SIGTERM):
            self.odd[f"a replica ended with status {left}"] += 1
        joins = self.events("join", name)
        if left != 0 and len(joins) > self._joins[name]:
            lines = JsonLines(RunFolder(self.folder).events, self.started)
            lines.write({"event": "death", "replica": name, "incarnation": joins[-1]["incarnation"]})
            lines.close()

    def tend(self) -> None:
        for name, process in self.processes.items():
            if name not in self._warned and process.exitcode is not None:
                self._warned.add(name)
                self.odd[f"{name} ended by itself with status {process.exitcode}"] += 1

    def wait_ready(self) -> None:
        """All have joined."""
        self.wait_until(lambda: len(self.events("join")) >= len(self.names), "a join of all")

    def finished(self) -> None:
        """The job is over: all hand in what they have, and end. Those that have not joined yet are ended."""
        self.finish.set()
        for name, process in self.processes.items():
            if name != "coordinator" and len(self.events("join", name)) <= self._joins[name]:
                self._warned.add(name)
                process.kill()
        deadline = time.monotonic() + _END_S
        for name in [name for name in self.processes if name != "coordinator"]:
            process = self.processes[name]
            process.join(max(0.1, deadline - time.monotonic()))
            if process.exitcode is None:
                self.odd[f"{name} did not end"] += 1
            elif process.exitcode != 0 and name not in self._warned:
                self.odd[f"{name} ended with status {process.exitcode}"] += 1


class TorchftJob:
    """A job of torchft's, which makes nothing of a notice. What ends by itself is started again."""

    def __init__(self, job: TheirJob, start_s: float) -> None:
        self.job = job
        self.odd: Counter[str] = Counter()
        self._start_s = start_s
        self._here: set[str] = set()
        self._due: dict[str, float] = {}

    def start(self, name: str) -> None:
        self._here.add(name)
        self.job.start(name)

    def wait_ready(self) -> None:
        """All train."""
        self.job.wait_until(lambda: {e["replica"] for e in self.job.events("step")} == set(self.job.names), "all")

    def warn(self, name: str) -> None:
        """A notice is of no use."""

    def remove(self, name: str) -> None:
        self._here.discard(name)
        if self._due.pop(name, None) is None:
            self.job.kill(name)

    def tend(self) -> None:
        now_s = time.monotonic()
        for name in sorted(self._here):
            if name in self._due and now_s >= self._due[name]:
                del self._due[name]
                self.job.start(name)
            elif name not in self._due and not self.job._processes[name].is_alive():
                self.odd["a replica ended by itself"] += 1
                self.job.died(name)
                self._due[name] = now_s + self._start_s


def play(todo: Sequence[Deed], jobs: Mapping[str, Job], *, began_s: float, end_s: float) -> float:
    """Does what the schedule says until ``end_s``; returns how late the latest deed was. The first machines' processes
    are there already.

    Args:
        todo: deeds in order of time, in seconds from ``began_s``.
        jobs: to all of them.
        began_s: by the wall clock.
        end_s: of the schedule.
    """
    late_s = 0.0
    first = todo[0].at_s
    for deed in [x for x in todo if first < x.at_s < end_s]:
        _pass(jobs, began_s + deed.at_s)
        late_s = max(late_s, time.time() - began_s - deed.at_s)
        for job in jobs.values():
            (job.start if deed.what == START else job.remove if deed.what == KILL else job.warn)(deed.node)
    _pass(jobs, began_s + end_s)
    return late_s


def _pass(jobs: Mapping[str, Job], until: float) -> None:
    """Lets the time pass."""
    while (left_s := until - time.time()) > 0:
        time.sleep(min(left_s, 0.1))
        for job in jobs.values():
            job.tend()
