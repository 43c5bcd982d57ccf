"""What a job keeps of its work while replicas die and come back all the time."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import ftopt
from benchmarks.speed.figures import QUICK_REPETITIONS, Row, Spread
from ftopt.telemetry.folder import RunFolder
from ftopt.telemetry.jsonl import read
from tests.sync.processes import TinyJob, tiny_job

REPLICAS = 4
STEP_S = 0.05
MEAN_S = 10.0
BACK_S = 3.0
SYNC = ftopt.Sync(
    grace_s=0.5, heartbeat_s=0.1, dead_after_s=1.0, start_s=60.0, recovery_s=5.0, forget_s=600.0, start_replicas=4
)
METHODS = {
    "DiLoCo": ftopt.DiLoCo(sync_every=20),
    "DiLoCo, delay": ftopt.StreamingDiLoCo(sync_every=20, delay=10, fragments=ftopt.Strided(n=1)),
}
ABOUT = (
    "Four replicas, real processes, whose inner step is a wait of 50 ms (so that a death does not make the others "
    "faster), a round every 20 steps. In turns: nothing happens, and somebody is killed every 10 s on average, at "
    "times drawn at random (the seed is fixed), and is started again after 3 s. *kept*: of the inner steps of those "
    "that live, the part that is in the model or pending. *rate*: inner steps for each second that a replica is there "
    "(from its welcome to its death), beside the same without faults. *in the model*: of all inner steps."
)
GOALS = {"100 - kept": 0.0, "100 - rate": 3.0}


DRAWN = "rate, %"


def run(quick: bool) -> list[Row]:
    """A row a method."""
    methods = list(METHODS)[:1] if quick else list(METHODS)
    return [_measure(method, *((3, 3.0, 2.5) if quick else (QUICK_REPETITIONS, 20.0, MEAN_S))) for method in methods]


def _measure(method: str, repetitions: int, window_s: float, mean_s: float) -> Row:
    chance = random.Random(7)
    windows: list[tuple[tuple[float, float], tuple[float, float]]] = []
    with (
        tempfile.TemporaryDirectory(prefix="ftopt-bench-") as folder,
        tiny_job(Path(folder), replicas=REPLICAS, method=METHODS[method], sync=SYNC, steps=None, step_s=STEP_S) as job,
    ):
        job.start_all()
        job.until("decide", count=3)
        for _ in range(repetitions):
            quiet = _window(job, window_s / 2)
            windows.append((quiet, _faulty(job, chance, window_s, mean_s)))
        job.enough()
        summary = job.end()
        steps = {name: [line["t_s"] for line in read(RunFolder(job.folder).steps(name))] for name in job.names}
        lives = _lives(job)
    rates = [[_rate(steps, lives, window) for window in pair] for pair in windows]
    executed, dead = summary["inner_steps_executed"], summary["dead_inner_steps_lost"]
    faulty_s = sum(stop - start for _, (start, stop) in windows)
    return {
        "way": method,
        "deaths": len(summary["deaths"]),
        "seconds between two": faulty_s / max(1, len(summary["deaths"])),
        "kept, %": 100.0 * (1 - summary["survivor_inner_steps_lost"] / (executed - dead)),
        "rate, %": Spread.of([100 * faulty / quiet for quiet, faulty in rates]),
        "in the model, %": 100.0 * (executed - dead) / executed,
        "died with their replica": dead,
    }


def _window(job: TinyJob, for_s: float) -> tuple[float, float]:
    """Seconds since the run's start in which nothing happens."""
    began = time.time() - job.started
    time.sleep(for_s)
    return began, time.time() - job.started


def _faulty(job: TinyJob, chance: random.Random, window_s: float, mean_s: float) -> tuple[float, float]:
    """Deaths and returns until all are there again."""
    began = time.time()
    strike_s, back_s = began + chance.expovariate(1 / mean_s), dict[str, float]()
    while (now := time.time()) < began + window_s or back_s:
        for name in [name for name, due_s in back_s.items() if now >= due_s]:
            del back_s[name]
            job.start(name)
        if strike_s <= now < began + window_s:
            strike_s = now + chance.expovariate(1 / mean_s)
            there = [name for name in job.names if name not in back_s]
            if len(there) > 1:
                name = chance.choice(there)
                job.kill(name)
                back_s[name] = now + BACK_S
        time.sleep(0.005)
    since_s = time.time() - job.started
    job.wait_until(lambda: _together(job, since_s), "all take part again")
    return began - job.started, time.time() - job.started


def _together(job: TinyJob, since_s: float) -> bool:
    late = [e["data"]["members"] for e in job.events("decide") if e["t_s"] > since_s]
    return any({m[0] for m in members if m[2] > 0} >= set(job.names) for members in late)


def _lives(job: TinyJob) -> dict[str, list[tuple[float, float]]]:
    """From when to when each replica was there, by incarnation."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in job.names}
    ends: dict[tuple[str, int], Any] = {
        (e["replica"], e["incarnation"]): e["t_s"] for e in (*job.events("end"), *job.events("death"))
    }
    for e in job.events("join"):
        found[e["replica"]].append((e["t_s"], ends[e["replica"], e["incarnation"]]))
    return found


def _rate(
    steps: dict[str, list[float]], lives: dict[str, list[tuple[float, float]]], window: tuple[float, float]
) -> float:
    """Inner steps in a window for each second that a replica was there."""
    start, stop = window
    made = sum(start <= t < stop for times in steps.values() for t in times)
    there_s = sum(max(0.0, min(stop, end) - max(start, begin)) for x in lives.values() for begin, end in x)
    return made / there_s
