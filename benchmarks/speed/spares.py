"""The time from a replica's death to the first step of the one that takes its place: a spare, or a new process."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ftopt
from benchmarks.speed.crew import coordinator
from benchmarks.speed.figures import Row, Spread
from benchmarks.speed.orders import crew

POLICY = ftopt.FaultPolicy(start_replicas=2, grace_s=5.0, dead_after_s=30.0, heartbeat_s=0.5, evict_after_s=120.0)
STEP_S = 0.02
EVERY = 25
MILLION = 1_000_000
REPETITIONS = 4
ABOUT = (
    "Three replicas train (an inner step is a wait of 20 ms, a round every 25 steps). One is killed with SIGKILL. "
    "*spare*: a fourth process stood by, and is promoted. *cold join*: a new process is started at the moment of the "
    "kill. *first step*: from the kill to the end of the first inner step of the one that takes the place. *to the "
    "job*: the part of it until the spare is told, or until the new process has imported everything and built the "
    "model. *in step*: from the kill until a version with a contribution of it is committed."
)
GOALS = "spare: first step within two heartbeats (1 s) and a step"
DRAWN = "first step, s"


def run(quick: bool) -> list[Row]:
    """Two rows a size."""
    sizes = (10,) if quick else (10, 50)
    return [row for millions in sizes for row in _measure(millions * MILLION, 2 if quick else REPETITIONS)]


def _measure(parameters: int, repetitions: int) -> list[Row]:
    told = {"parameters": parameters, "policy": asdict(POLICY), "step_s": STEP_S, "sync_every": EVERY}
    found: dict[str, list[dict[str, float]]] = {"spare": [], "cold join": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))
        told["url"] = stack.enter_context(coordinator(folder))
        there = [told | {"replica": f"r{i}", "started_s": time.time()} for i in range(2)]
        stack.enter_context(crew("benchmarks.speed.joiner", there)).all("first")
        vacant = "a"  # the id of the one that was killed last: the next one comes under it
        for number in range(repetitions):
            for way in ("spare", "cold join") if number % 2 else ("cold join", "spare"):
                spare = "ab".replace(vacant, "") if way == "spare" else ""
                found[way].append(_replace(told, vacant, spare))
                vacant = spare or vacant
    size = f"{parameters // MILLION}M"
    return [
        {"parameters": size, "way": way, **{key: Spread.of([x[key] for x in taken]) for key in taken[0]}}
        for way, taken in found.items()
    ]


def _replace(told: dict[str, Any], victim: str, spare: str) -> dict[str, float]:
    """``victim`` joins and is killed; ``spare`` takes its place, "": a new process of its id. That one is killed at the
    end, too."""
    with ExitStack() as stack:
        dies = stack.enter_context(ExitStack())
        dies.enter_context(crew("benchmarks.speed.joiner", [_started(told, victim)])).all("first")
        if spare:
            waits = stack.enter_context(crew("benchmarks.speed.joiner", [_started(told, spare, standby=True)]))
            waits.all("held")
            time.sleep(4 * EVERY * STEP_S)
        killed_s = time.time()
        dies.close()
        if not spare:
            waits = stack.enter_context(crew("benchmarks.speed.joiner", [_started(told, victim)]))
        (stepped,) = waits.all("stepped")
        (first,) = waits.all("first")
    at = {name: at_s - killed_s for name, at_s in (stepped | first).items()}
    return {
        "first step, s": at["stepped"],
        "to the job, s": at["promoted" if spare else "made"],
        "in step, s": at["commit"],
    }


def _started(told: dict[str, Any], replica: str, *, standby: bool = False) -> dict[str, Any]:
    """What a process is told; its moments are seconds since 1970."""
    return told | {"replica": replica, "standby": standby, "started_s": 0.0}
