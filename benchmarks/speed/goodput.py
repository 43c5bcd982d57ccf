"""How much of its work a job keeps while replicas die and come back all the time; compared with torchft."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ftopt
from benchmarks.speed.figures import FEWER_REPETITIONS, Row, Spread
from benchmarks.speed.stall import together
from benchmarks.speed.theirjob import TheirJob, their_job
from benchmarks.speed.theirs import NoPeerError, TimeOuts
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines
from tests.sync.processes.job import TinyJob, tiny_job

REPLICAS = 4
EVERY = 20
POLICY = ftopt.FaultPolicy(
    grace_s=0.5, heartbeat_s=0.1, dead_after_s=1.0, start_s=60.0, recovery_s=5.0, evict_after_s=600.0, start_replicas=4
)
METHODS = {
    "DiLoCo": ftopt.DiLoCo(sync_every=EVERY),
    "DiLoCo, delay": ftopt.StreamingDiLoCo(sync_every=EVERY, delay=10, fragments=ftopt.fragments.Strided(n=1)),
}
THEIRS = TimeOuts(heartbeat_s=POLICY.dead_after_s, join_s=2.0, operation_s=10.0)
ABOUT = (
    "Four replicas, real processes, whose inner step is a wait of 50 ms (so that a death does not make the others "
    "faster), a round every 20 steps; ftopt and torchft 0.2.0 at the same time, with the same deaths. In turns: "
    "no faults, and a replica is killed every 10 s on average, at times drawn at random (the seed is fixed), and "
    f"is restarted after 3 s. torchft: heartbeat time-out {THEIRS.heartbeat_s:g} s, stragglers waited for "
    f"{THEIRS.join_s:g} s (two periods). *kept*: the part of the living replicas' inner steps that is in the model "
    "or pending. *rate*: inner steps per second of a replica's presence (from its welcome to its death), relative to "
    "the same without faults. *in the model*: the part of all inner steps, dead replicas' included."
)
GOALS = "kept 100 %; rate >= 97 %"
DRAWN = "rate, %"

Lives = Mapping[str, Sequence[tuple[float, float]]]
"""Replica -> from when to when it was there, in the job's seconds."""
Window = tuple[float, float]


class Pace(NamedTuple):
    """Seconds: an inner step, between two deaths on average, until the return, and the two windows."""

    step_s: float = 0.05
    mean_s: float = 10.0
    back_s: float = 3.0
    quiet_s: float = 6.0
    faulty_s: float = 15.0


QUICK = Pace(step_s=0.02, mean_s=1.5, back_s=1.0, quiet_s=1.5, faulty_s=2.0)


class Work(NamedTuple):
    """What came of a job.

    Args:
        steps: replica -> when it has taken an inner step, in the job's seconds.
        lives: when it was there.
        executed: inner steps, from the first window on or in all.
        dead: of them, those that died with their replica.
        lost: of them, those that others have lost.
    """

    steps: Mapping[str, Sequence[float]]
    lives: Lives
    executed: int
    dead: int
    lost: int


class Job(Protocol):
    """What both kinds of job can do."""

    names: list[str]
    started: float

    def start(self, name: str) -> Any: ...

    def kill(self, name: str) -> None: ...


def run(quick: bool) -> list[Row]:
    """A row a way."""
    chance = random.Random(12)
    pace, repetitions = (QUICK, 2) if quick else (Pace(), FEWER_REPETITIONS)
    windows: list[tuple[Window, Window]] = []
    with ExitStack() as stack:
        jobs = _started(stack, pace.step_s)
        _all_together(jobs)
        for _ in range(repetitions):
            began = time.time()
            time.sleep(pace.quiet_s)
            quiet = (began, time.time())
            windows.append((quiet, _faulty(jobs, chance, pace)))
        works = {
            way: _theirs(job, windows[0][0][0] - job.started) if isinstance(job, TheirJob) else _ours(job)
            for way, job in jobs.items()
        }
        deaths = {way: len(job.events("death")) for way, job in jobs.items()}
        return [row(way, work, _since(jobs[way].started, windows), deaths[way]) for way, work in works.items()]


def _started(stack: ExitStack, step_s: float) -> dict[str, TinyJob | TheirJob]:
    jobs: dict[str, TinyJob | TheirJob] = {}
    for way, method in METHODS.items():
        ours = tiny_job(_folder(stack), replicas=REPLICAS, method=method, policy=POLICY, steps=None, step_s=step_s)
        jobs[way] = stack.enter_context(ours)
    with suppress(NoPeerError):
        theirs = their_job(_folder(stack), replicas=REPLICAS, sync_every=EVERY, step_s=step_s, times=THEIRS)
        jobs["torchft"] = stack.enter_context(theirs)
    for job in jobs.values():
        job.start_all()
    return jobs


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))


def _since(started: float, windows: Sequence[tuple[Window, Window]]) -> list[tuple[Window, Window]]:
    """In seconds since a job's start."""
    return [tuple((a - started, b - started) for a, b in pair) for pair in windows]  # type: ignore[misc]


def row(way: str, work: Work, windows: Sequence[tuple[Window, Window]], deaths: int) -> Row:
    """Of pairs of a quiet and a faulty window."""
    rates = [[rate(work.steps, work.lives, window) for window in pair] for pair in windows]
    return {
        "way": way,
        "deaths": deaths,
        "seconds between two": sum(stop - start for _, (start, stop) in windows) / max(1, deaths),
        "kept, %": 100.0 * (1 - work.lost / (work.executed - work.dead)),
        "rate, %": Spread.of([100 * faulty / quiet for quiet, faulty in rates]),
        "in the model, %": 100.0 * (work.executed - work.dead - work.lost) / work.executed,
        "died with their replica": work.dead,
        "lost by others": work.lost,
    }


def rate(steps: Mapping[str, Sequence[float]], lives: Lives, window: Window) -> float:
    """Inner steps in a window for each second that a replica was there."""
    start, stop = window
    made = sum(start <= t < stop for times in steps.values() for t in times)
    there_s = sum(max(0.0, min(stop, end) - max(start, begin)) for x in lives.values() for begin, end in x)
    return made / there_s


def _faulty(jobs: Mapping[str, Job], chance: random.Random, pace: Pace) -> Window:
    """Deaths and returns, of the same replica in all jobs; it ends as long after the last return as that took."""
    began = time.time()
    end_s = began + pace.faulty_s
    strike_s, back_s = began + chance.expovariate(1 / pace.mean_s), dict[str, float]()
    names = next(iter(jobs.values())).names
    while (now := time.time()) < end_s or back_s:
        for name in [name for name, due_s in back_s.items() if now >= due_s]:
            del back_s[name]
            end_s = max(end_s, now + pace.back_s)
            for job in jobs.values():
                job.start(name)
        if strike_s <= now < began + pace.faulty_s:
            strike_s = now + chance.expovariate(1 / pace.mean_s)
            there = [name for name in names if name not in back_s]
            if len(there) > 1:
                name = chance.choice(there)
                for job in jobs.values():
                    job.kill(name)
                back_s[name] = now + pace.back_s
        time.sleep(0.005)
    window = (began, time.time())
    _all_together(jobs)
    return window


def _all_together(jobs: Mapping[str, Any]) -> None:
    now = time.time()
    for job in jobs.values():
        since_s = now - job.started
        job.wait_until(lambda job=job, since_s=since_s: _is_together(job, since_s), "an outer step of all")


def _is_together(job: TinyJob | TheirJob, since_s: float) -> bool:
    return job.together(since_s) if isinstance(job, TheirJob) else together(job, since_s)


def _ours(job: TinyJob) -> Work:
    """From its events and its summary, after its end."""
    job.enough()
    summary = job.end()
    ends: dict[tuple[str, int], float] = {
        (e["replica"], e["incarnation"]): e["t_s"] for e in (*job.events("end"), *job.events("death"))
    }
    lives: dict[str, list[tuple[float, float]]] = {name: [] for name in job.names}
    for e in job.events("join"):
        lives[e["replica"]].append((e["t_s"], ends[e["replica"], e["incarnation"]]))
    steps = {name: [line["t_s"] for line in read_lines(RunFolder(job.folder).steps(name))] for name in job.names}
    executed, dead = summary["inner_steps_executed"], summary["dead_inner_steps_lost"]
    return Work(steps, lives, executed, dead, summary["survivor_inner_steps_lost"])


def _theirs(job: TheirJob, since_s: float) -> Work:
    """What happened since then."""
    return counted({name: job.events(None, name) for name in job.names}, since_s, time.time() - job.started)


def counted(events: Mapping[str, Sequence[Mapping[str, Any]]], since_s: float, now_s: float) -> Work:
    """Of a `TheirJob`: an outer step that fails takes the inner steps since the last one with it, as a death does."""
    lives: dict[str, list[tuple[float, float]]] = {name: [] for name in events}
    steps: dict[str, list[float]] = {name: [] for name in events}
    dead = lost = 0
    for name, lines in events.items():
        joined_s, pending = None, 0
        for e in lines:
            if e["event"] == "join":
                joined_s, pending = e["t_s"], 0
            elif e["event"] == "step" and e["t_s"] >= since_s:
                steps[name].append(e["t_s"])
                pending += 1
            elif e["event"] == "round":
                lost += pending * (not e["committed"])
                pending = 0
            elif e["event"] == "death":
                lives[name] += [] if joined_s is None else [(joined_s, e["t_s"])]
                dead += pending
                joined_s, pending = None, 0
        lives[name] += [] if joined_s is None else [(joined_s, now_s)]
    return Work(steps, lives, sum(map(len, steps.values())), dead, lost)
