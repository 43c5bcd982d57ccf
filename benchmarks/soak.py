"""The soak test: six replicas, a fault of any kind every five seconds on average, for as long as requested.

Printed: each fault; the losses; the longest time without an outer step; and how threads, file descriptors, sockets
and memory of the coordinator's last life and of the replicas that are never killed have grown, from the first to the
last quarter of the calm moments (`benchmarks.meter`) of their life without its first tenth of the soak.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ftopt
from benchmarks.meter import TROUBLE, Calm, Growth, Meter
from ftopt.cli.shared.output import say
from ftopt.run.fault_spec import COORDINATOR, Fault
from tests.sync.processes.job import FAST, NOW, TinyJob, tiny_job

REPLICAS = 6
KEPT = ("r0", "r1")
"""Never killed, but struck by all the rest: their growth can be measured."""
POLICY = replace(FAST, start_replicas=REPLICAS, grace_s=0.5, heartbeat_s=0.2, dead_after_s=1.5, recovery_s=8.0)
STEP_S = 0.02
GROWTH = 0.05
"""Grown is whatever is larger by more than this part: of less than 20 threads a single one more."""
MOMENTS = 20
"""With fewer calm moments of a process its growth is not judged, and that is bad."""
STILL_S = 15.0
"""Without an outer step for so long there is no progress."""
_SAMPLE_S = 1.0
_DOOM_S = 45.0
"""An ordered death has happened by then: its point comes with every outer step, 10 s after a coordinator's."""
_SETTLE_S = 60.0
"""After the last fault the job is calm by then."""
_LAST_MOMENTS = 10
_BORN = 0.45
_WARM = 0.1
"""Parts of the time: whose life began later is not judged, nor is the beginning of a life."""
_COORDINATOR_SHARE = 0.12
_THAW = "the coordinator goes on"
_FIRST_PART = 0.35
"""The coordinator is killed in this part of the time only: what it holds later must not grow."""

REPLICA_FAULTS: tuple[Fault, ...] = (
    Fault(point="inner", do="kill"),
    Fault(point="reduce", do="kill"),
    Fault(point="prepare", do="kill"),
    Fault(point="commit", do="kill"),
    Fault(point=NOW, do="stop", for_s=0.7),
    Fault(point=NOW, do="stop", for_s=2.5),
    Fault(point="inner", do="hang", for_s=2.0),
    Fault(point=NOW, do="partition", for_s=0.5),
    Fault(point=NOW, do="partition", for_s=3.0),
    Fault(point="reduce.after", do="corrupt"),
    Fault(point="reduce.after", do="corrupt", times=2),
    Fault(point="prepare", do="corrupt"),
    Fault(point="apply", do="corrupt", what="anchor"),
    Fault(point="apply", do="corrupt", what="outer"),
    Fault(point="inner", do="nan", what="params"),
    Fault(point="inner", do="nan", what="grads"),
    Fault(point="inner", do="slow", factor=4.0, for_s=3.0),
)
COORDINATOR_FAULTS = ("stop", "kill", "kill and delete the journal")


class SoakError(Exception):
    """The soak cannot go on: what happened."""


class Soak:
    """One soak of a running job.

    Args:
        job: all of its replicas are started.
        seconds: how long it is struck.
        seed: of the faults.
        every_s: seconds between two faults, on average.
    """

    def __init__(self, job: TinyJob, *, seconds: float, seed: int, every_s: float) -> None:
        self.meter = Meter(job)
        self.faults: Counter[str] = Counter()
        self._job = job
        self._seconds = seconds
        self._every_s = every_s
        self._chance = random.Random(seed)
        self._later: list[tuple[float, str, Callable[[], None]]] = []
        self._doomed: dict[str, tuple[float, str]] = {}
        self._calm = Calm(job.names)
        self._heard = 0
        self._look_s = 0.0
        self._busy_until_s = 0.0
        self._start_s = time.monotonic()

    def run(self) -> None:
        """Strikes until the time is over, then waits until all is calm.

        Raises:
            SoakError: a process has ended by itself, or has not died of what should have killed it, or it does not
                become calm.
        """
        due_s = self._chance.expovariate(1 / self._every_s)
        while (now_s := self._now_s()) < self._seconds:
            if now_s >= due_s:
                due_s = now_s + self._chance.expovariate(1 / self._every_s)
                self._strike(now_s)
            self._tend(now_s)
            time.sleep(0.05)
        calm = 0
        while self._later or self._doomed or calm < _LAST_MOMENTS:
            if (now_s := self._now_s()) > self._seconds + _SETTLE_S + _DOOM_S:
                raise SoakError(f"not calm {_SETTLE_S + _DOOM_S:g} s after the last fault; doomed: {self._doomed}")
            calm += self._tend(now_s)
            time.sleep(0.05)

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _strike(self, now_s: float) -> None:
        if self._chance.random() < _COORDINATOR_SHARE:
            self._strike_coordinator(now_s)
            return
        fault = self._chance.choice(REPLICA_FAULTS)
        alive = [name for name in self._job.names if name in self._job.processes and name not in self._doomed]
        if fault.do == "kill":
            alive = [name for name in alive if name not in KEPT]
        if len(alive) < (1 if fault.do != "kill" else 2):
            return
        name = self._chance.choice(alive)
        self._say(now_s, name, f"{fault.do} {fault.aim} at {fault.point} x{fault.times}, {fault.for_s} s", fault.do)
        self._job.order(name, fault)
        if fault.do == "kill":
            self._doomed[name] = (now_s + _DOOM_S, f"{fault.do} at {fault.point}, ordered at {now_s:.1f} s")

    def _strike_coordinator(self, now_s: float) -> None:
        kind = self._chance.choice(COORDINATOR_FAULTS)
        if COORDINATOR not in self._job.processes:
            return
        if now_s > self._seconds * _FIRST_PART or now_s < self._busy_until_s:
            kind = "stop"
        self._busy_until_s = now_s + POLICY.recovery_s + 2
        self._say(now_s, COORDINATOR, kind, f"coordinator: {kind}")
        process = self._job.processes[COORDINATOR]
        assert process.pid is not None
        if kind == "stop":
            pid, for_s = process.pid, self._chance.choice((0.7, 2.5))
            os.kill(pid, signal.SIGSTOP)
            self._later.append((now_s + for_s, _THAW, lambda: os.kill(pid, signal.SIGCONT)))
            return
        self._later = [x for x in self._later if x[1] != _THAW]
        self._job.kill(COORDINATOR)
        if kind != "kill":
            for path in self._job.folder.glob("journal.sqlite*"):
                path.unlink()
        self._later.append((now_s + 1.0, COORDINATOR, self._job.start_coordinator))

    def _tend(self, now_s: float) -> bool:
        """What has become due: processes that come back, sizes to look at. True when it saw a calm moment."""
        due = [x for x in self._later if x[0] <= now_s]
        self._later = [x for x in self._later if x[0] > now_s]
        for _, _, call in due:
            call()
        for name, process in list(self._job.processes.items()):
            if name in self._doomed and not process.is_alive():
                del self._doomed[name]
                self._job.died(name)
                self._later.append((now_s + 1.0, name, self._start(name)))
            elif name in self._doomed and now_s > self._doomed[name][0]:
                raise SoakError(f"{name} lives on {_DOOM_S:g} s after its {self._doomed[name][1]}")
            elif not process.is_alive():
                raise SoakError(f"{name} has ended by itself with status {process.exitcode}")
        if now_s < self._look_s:
            return False
        self._look_s = now_s + _SAMPLE_S
        return self._look(now_s)

    def _look(self, now_s: float) -> bool:
        events = self._job.events()
        told_s = time.time() - self._job.started
        for event in events[self._heard :]:
            self._calm.hear(event)
        self._heard = len(events)
        if self._later or self._doomed:
            self._calm.trouble(told_s)
        calm = self._calm.is_calm(told_s)
        self.meter.look(now_s, calm=calm)
        return calm

    def _start(self, name: str) -> Callable[[], None]:
        def start() -> None:
            self._job.start(name)

        return start

    def _say(self, now_s: float, name: str, text: str, kind: str) -> None:
        self.faults[kind] += 1
        say(f"{now_s:7.1f} s  {name:<12} {text}")


def add(parser: argparse.ArgumentParser) -> None:
    """[--minutes N] [--seed S] [--every-s X]"""
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: %(default)s)")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between faults (default: %(default)g)")
    parser.add_argument("--folder", type=Path, help="keep the run's files there (default: a temporary folder)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the figures; 1 when a survivor lost a step, progress ended, or something grew."""
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        return _soak(arguments, arguments.folder)
    with tempfile.TemporaryDirectory(prefix="ftopt-soak-") as folder:
        return _soak(arguments, Path(folder))


def _soak(arguments: argparse.Namespace, folder: Path) -> int:
    say(f"seed {arguments.seed}, {arguments.minutes:g} minutes, a fault every {arguments.every_s:g} s on average")
    method = ftopt.DiLoCo(sync_every=20)
    seconds = arguments.minutes * 60
    with tiny_job(folder, replicas=REPLICAS, policy=POLICY, steps=None, step_s=STEP_S, method=method) as job:
        job.start_all()
        job.until("decide", count=3)
        soak = Soak(job, seconds=seconds, seed=arguments.seed, every_s=arguments.every_s)
        try:
            soak.run()
        except SoakError as error:
            say(f"bad: {error}")
            return 1
        job.enough(more=100)
        summary = job.end()
        decided = [e["t_s"] for e in job.events("decide")]
        told = Counter(e["event"] for e in job.events() if e["event"] in TROUBLE)
        growth = soak.meter.growth(born_s=_BORN * seconds, warm_s=_WARM * seconds)
    still_s = max((b - a for a, b in itertools.pairwise(decided)), default=0.0)
    say(f"faults: {sum(soak.faults.values())}: " + ", ".join(f"{n} {k}" for k, n in sorted(soak.faults.items())))
    say("events: " + ", ".join(f"{n} {event}" for event, n in sorted(told.items())))
    for key in _KEYS:
        say(f"{key}: {summary[key]}")
    say(f"longest time without an outer step: {still_s:.1f} s")
    bad = _judge(summary, still_s)
    bad += _judge_growth(growth)
    say("bad: " + "; ".join(bad) if bad else "all good")
    return 1 if bad else 0


_KEYS = (
    "outer_steps",
    "attempts_aborted",
    "inner_steps_executed",
    "inner_steps_committed",
    "inner_steps_pending",
    "inner_steps_discarded",
    "dead_inner_steps_lost",
    "survivor_inner_steps_lost",
    "inner_steps_counted_twice",
    "chain_conflicts",
    "stall_s",
    "wall_s",
)


def _judge(summary: dict[str, object], still_s: float) -> list[str]:
    zero = ("survivor_inner_steps_lost", "inner_steps_counted_twice")
    bad = [f"{key}={summary[key]}" for key in zero if summary[key]]
    bad += [f"forks at {summary['chain_conflicts']}"] if summary["chain_conflicts"] else []
    digests = summary["anchor_digests"]
    assert isinstance(digests, dict)
    bad += [f"digests differ: {digests}"] if len(set(digests.values())) != 1 else []
    bad += [f"no outer step for {still_s:.1f} s"] if still_s > STILL_S else []
    return bad


def _judge_growth(growth: list[Growth]) -> list[str]:
    bad = []
    for x in growth:
        grown = x.last > x.first * (1 + GROWTH)
        say(
            f"{x.process:<12} {x.what:<8} {x.first:8.1f} -> {x.last:8.1f} at {x.moments} calm moments; "
            f"{x.most:.1f} at most{'  GROWS' if grown else ''}"
        )
        bad += [f"{x.what} of {x.process} grows"] if grown else []
    for name in (COORDINATOR, *KEPT):
        moments = max((x.moments for x in growth if x.process == name), default=0)
        bad += [f"only {moments} calm moments of {name}: too few to judge growth"] if moments < MOMENTS else []
    return bad
