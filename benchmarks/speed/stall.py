"""What the others lose when a replica is killed or hangs, at each point of a round; beside torchft."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ftopt
from benchmarks.speed.figures import FEWER_REPETITIONS, Row, Spread
from benchmarks.speed.theirjob import TheirJob, their_job
from benchmarks.speed.theirs import NoPeerError, TimeOuts
from ftopt.run.fault_spec import Fault
from tests.sync.processes.job import TinyJob, tiny_job

STEP_S = 0.02
EVERY = 20
POLICY = ftopt.FaultPolicy(
    grace_s=0.25, heartbeat_s=0.1, dead_after_s=1.0, start_s=60.0, recovery_s=5.0, evict_after_s=600.0, start_replicas=3
)
METHODS = {
    "blocking": ftopt.DiLoCo(sync_every=EVERY),
    "delay": ftopt.StreamingDiLoCo(sync_every=60, delay=40, fragments=ftopt.fragments.Strided(n=1)),
}
THEIRS = TimeOuts(heartbeat_s=POLICY.dead_after_s, join_s=1.0, operation_s=10.0)
DEFAULTS = TimeOuts()
ABOUT = (
    "Three replicas, real processes, with inner steps of 20 ms and a round every 20 of them; *delay*: one every 60, "
    "its result applied 40 steps (0.8 s) later. One is killed (SIGKILL), hangs (its training thread; heartbeats "
    "continue) or stops (SIGSTOP, the whole process), and comes back later. ftopt: "
    f"grace_s={POLICY.grace_s:g}, dead_after_s={POLICY.dead_after_s:g}. torchft 0.2.0 does the same work: heartbeat "
    f"time-out {THEIRS.heartbeat_s:g} s, stragglers waited for {THEIRS.join_s:g} s (if that is less than a period, "
    f"replicas that are out of step never meet again), everything else {THEIRS.operation_s:g} s; and once at its "
    f"defaults, "
    f"{DEFAULTS.heartbeat_s:g}, {DEFAULTS.join_s:g} and {DEFAULTS.operation_s:g} s. How long outer steps keep the "
    "training threads of the other two: *usual*, and in the rounds after the fault the longest and the second longest "
    "(the price should be paid once); the worse of the two. *lost*: inner steps lost by one of the others, per fault."
)
GOALS = (
    "kill: blocking <= 0.3 s; hang or stop: blocking <= grace_s + half a second (or two steps) + a reduction = "
    f"{POLICY.grace_s + 0.55:g} s; with delay <= 0.02 s; lost 0"
)
DRAWN, SCALE = "longest, s", "log"


class Case(NamedTuple):
    """A fault: where, and what."""

    point: str
    do: str


CASES = {
    "killed in the inner phase": Case("inner", "kill"),
    "killed in the reduction": Case("reduce", "kill"),
    "killed after it": Case("reduce.after", "kill"),
    "hangs in the inner phase": Case("inner", "hang"),
    "stops in the reduction": Case("reduce", "stop"),
}
AT_DEFAULTS = ("killed in the reduction", "hangs in the inner phase", "stops in the reduction")
_HANGS_S = 2.0
_VICTIM = "r1"
_OTHERS = ("r0", "r2")
_USUAL = 6
"""Rounds without a fault, to begin with."""


class Struck(NamedTuple):
    """What a fault has cost the worse of the others.

    Args:
        longest_s: the longest stall after it.
        second_s: the second longest.
        lost: inner steps.
        ended: how many of them have ended with an error.
    """

    longest_s: float
    second_s: float
    lost: float = 0.0
    ended: int = 0

    @classmethod
    def of(cls, stalls: Sequence[Sequence[float]], lost: float = 0.0, ended: int = 0) -> Struck:
        """Of each other's stalls."""
        longest = [sorted([*each, 0.0], reverse=True)[:2] for each in stalls]
        return cls(max(each[0] for each in longest), max(each[1] for each in longest), lost, ended)


class Job(Protocol):
    """A job of ftopt's or torchft's, as this benchmark sees it."""

    def heal(self) -> None:
        """Waits until all take part again."""

    def usual_s(self) -> float:
        """Median stall of the first rounds."""

    def strike(self, case: Case) -> Struck:
        """One fault; the victim then comes back."""

    def end(self) -> float:
        """Inner steps of the others that were lost, as far as `strike` has not told of them."""


class Ours:
    """ftopt's."""

    def __init__(self, job: TinyJob) -> None:
        self._job = job
        self._since_s = 0.0
        job.start_all()

    def heal(self) -> None:
        self._job.wait_until(lambda: together(self._job, self._since_s), "all three take part again")

    def usual_s(self) -> float:
        self._job.until("decide", count=_USUAL)
        return statistics.median(float(e["data"]["stall_s"]) for e in self._job.events("stall"))

    def strike(self, case: Case) -> Struck:
        job, count = self._job, len(self._job.events("fault", _VICTIM))
        job.order(_VICTIM, Fault(point=case.point, do=case.do, for_s=None if case.do == "kill" else _HANGS_S))
        struck = job.until("fault", _VICTIM, count=count + 1)
        second = job.after(struck, "decide", count=2)
        for name in _OTHERS:
            job.after(second, "stall", name)
        stalls = [
            [e["data"]["stall_s"] for e in job.events("stall", name) if e["t_s"] > struck["t_s"]] for name in _OTHERS
        ]
        self._since_s = struck["t_s"] + _HANGS_S
        if case.do == "kill":
            job.died(_VICTIM)
            job.start(_VICTIM)
            self._since_s = job.events()[-1]["t_s"]
        return Struck.of(stalls)

    def end(self) -> float:
        self._job.enough()
        lost: int = self._job.end()["survivor_inner_steps_lost"]
        return lost / len(_OTHERS)


class Theirs:
    """torchft's. A commit that fails costs a replica what it has done since the last one."""

    def __init__(self, job: TheirJob, hangs_s: float = _HANGS_S) -> None:
        self._job = job
        self._hangs_s = hangs_s
        self._since_s = 0.0
        job.start_all()

    def heal(self) -> None:
        self._job.revive()
        self._job.wait_until(lambda: self._job.together(self._since_s), "all three take part again")

    def usual_s(self) -> float:
        self._job.wait_until(lambda: len(self._job.events("round", _OTHERS[0])) > _USUAL, "the first rounds")
        return statistics.median(float(e["stall_s"]) for e in self._job.events("round", _OTHERS[0])[2:])

    def strike(self, case: Case) -> Struck:
        job, count = self._job, len(self._job.events("fault"))
        job.order(_VICTIM, Fault(point=case.point, do=case.do, for_s=None if case.do == "kill" else self._hangs_s))
        job.wait_until(lambda: len(job.events("fault")) > count, "the fault")
        struck_s = job.events("fault")[-1]["t_s"]

        def rounds() -> list[list[dict[str, Any]]]:
            return [[e for e in job.events("round", name) if e["t_s"] > struck_s] for name in _OTHERS]

        job.wait_until(lambda: all(len(e) > 1 or (e and not e[-1]["members"]) for e in rounds()), "two rounds")
        found = rounds()
        if case.do == "kill":
            job.died(_VICTIM)
            job.start(_VICTIM)
        elif case.do == "stop":
            job.wake(_VICTIM)
        self._since_s = job.events()[-1]["t_s"]
        lost = max(sum(EVERY for e in each if not e["committed"]) for each in found)
        ended = sum(not each[-1]["members"] for each in found)
        return Struck.of([[e["stall_s"] for e in each] for each in found], lost, ended)

    def end(self) -> float:
        return 0.0


def run(quick: bool) -> list[Row]:
    """A row a fault and way."""
    cases = {name: CASES[name] for name in AT_DEFAULTS[:2]} if quick else CASES
    with ExitStack() as stack:
        jobs: dict[str, Job] = {way: Ours(stack.enter_context(_ours(method))) for way, method in METHODS.items()}
        once: dict[str, Future[Row]] = {}
        with suppress(NoPeerError):
            if not quick:
                jobs["torchft"] = Theirs(stack.enter_context(_theirs(THEIRS)))
                pool = stack.enter_context(ThreadPoolExecutor(len(AT_DEFAULTS)))  # they do nothing but wait
                once = {name: pool.submit(_at_defaults, name) for name in AT_DEFAULTS}
        rows = _in_turns(jobs, cases, 2 if quick else FEWER_REPETITIONS)
        rows += [each.result() for each in once.values()]
    return sorted(rows, key=lambda row: list(CASES).index(row["fault"]))


def _in_turns(jobs: dict[str, Job], cases: dict[str, Case], repetitions: int) -> list[Row]:
    """While one job is struck, the others come together again."""
    for job in jobs.values():
        job.heal()
    usual_s = {way: job.usual_s() for way, job in jobs.items()}
    found: dict[tuple[str, str], list[Struck]] = {(name, way): [] for name in cases for way in jobs}
    for _ in range(repetitions):
        for name, case in cases.items():
            for way, job in jobs.items():
                job.heal()
                found[name, way].append(job.strike(case))
    more = {way: job.end() / (repetitions * len(cases)) for way, job in jobs.items()}
    return [row(name, way, usual_s[way], struck, more[way]) for (name, way), struck in found.items()]


def row(fault: str, way: str, usual_s: float, struck: list[Struck], more_lost: float = 0.0) -> Row:
    """Of one fault's repetitions; ``more_lost`` by each of them."""
    one = len(struck) == 1
    ended = sum(each.ended for each in struck)
    return {
        "fault": fault,
        "way": f"{way}: {ended} of {len(_OTHERS) * len(struck)} end with an error" if ended else way,
        "usual, s": usual_s,
        DRAWN: struck[0].longest_s if one else Spread.of([each.longest_s for each in struck]),
        "second, s": struck[0].second_s if one else Spread.of([each.second_s for each in struck]),
        "lost": statistics.fmean(each.lost for each in struck) + more_lost,
    }


def _at_defaults(name: str) -> Row:
    with _theirs(DEFAULTS) as made:
        job = Theirs(made, 1.2 * DEFAULTS.join_s)
        job.heal()
        return row(name, "torchft, defaults, once", job.usual_s(), [job.strike(CASES[name])])


@contextmanager
def _ours(method: Any) -> Iterator[TinyJob]:
    with (
        tempfile.TemporaryDirectory(prefix="ftopt-bench-") as folder,
        tiny_job(Path(folder), method=method, policy=POLICY, steps=None, step_s=STEP_S) as job,
    ):
        yield job


@contextmanager
def _theirs(times: TimeOuts) -> Iterator[TheirJob]:
    with (
        tempfile.TemporaryDirectory(prefix="ftopt-bench-") as folder,
        their_job(Path(folder), replicas=3, sync_every=EVERY, step_s=STEP_S, times=times) as job,
    ):
        yield job


def together(job: TinyJob, since_s: float) -> bool:
    """Whether all have taken part in one outer step since then, with inner steps."""
    members = [e["data"]["members"] for e in job.events("decide") if e["t_s"] > since_s]
    return any({m[0] for m in each if m[2] > 0} >= set(job.names) for each in members)
