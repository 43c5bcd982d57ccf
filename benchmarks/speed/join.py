"""The time from a replica's process start to its first contribution, and what that costs the others."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ftopt
from benchmarks.speed.crew import coordinator
from benchmarks.speed.figures import FEWER_REPETITIONS, Row, Spread
from benchmarks.speed.orders import Crew, crew

POLICY = ftopt.FaultPolicy(start_replicas=2, grace_s=5.0, dead_after_s=30.0, heartbeat_s=0.5, evict_after_s=30.0)
STEP_S = 0.02
EVERY = 25
ABOUT = (
    "Two replicas train (an inner step is a wait of 20 ms, a round every 25 steps); a third is started as a new "
    "process, joins, contributes once and is killed, again and again. *committed*: from the start of the process to "
    "the commit of its first contribution. This includes *imports* (python, torch, ftopt, aiohttp), *model* (built on "
    "the newcomer), *transfer*: the last transfer of the committed state (anchor and momentum, fp32), *before*: "
    "earlier transfers that a round overtook, and *the rest*: mostly the others' round, which comes every half "
    "second. *others*: by how much the others' inner steps are slower from the newcomer's start to its first commit, "
    "without rounds; *their wait*: by how much their longest outer step meanwhile exceeds the usual one."
)
GOALS = "committed <= imports + transfer + 0.5 s; transfer >= 500 MB/s; others, their wait: 0"
MILLION = 1_000_000


DRAWN = "committed, s"


def run(quick: bool) -> list[Row]:
    """A row a size."""
    if quick:
        return [_measure(10 * MILLION, 2, warm=0)]
    return [_measure(millions * MILLION, FEWER_REPETITIONS) for millions in (10, 50)]


def _measure(parameters: int, repetitions: int, *, warm: int = 1) -> Row:
    told = {"parameters": parameters, "policy": asdict(POLICY), "step_s": STEP_S, "sync_every": EVERY}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))
        told["url"] = stack.enter_context(coordinator(folder))
        there = [told | {"replica": f"r{i}", "started_s": time.time()} for i in range(2)]
        others = stack.enter_context(crew("benchmarks.speed.joiner", there))
        others.all("first")
        found = [_join(others, told | {"replica": f"n{i}"}, parameters) for i in range(warm + repetitions)][warm:]
    return {"parameters": f"{parameters // MILLION}M", **{key: Spread.of([x[key] for x in found]) for key in found[0]}}


def _join(others: Crew, told: dict[str, Any], parameters: int) -> dict[str, float]:
    """One newcomer: seconds, but for the transfer's MB/s."""
    others.all("steps")  # what was before does not count
    while min(each["steps"] for each in others.all("count")) < 4 * EVERY:
        time.sleep(EVERY * STEP_S)
    quiet, usual = _work_s(others)
    with crew("benchmarks.speed.joiner", [told | {"started_s": time.time()}]) as newcomer:
        (at,) = newcomer.all("first")
        disturbed, waits = _work_s(others)
    transfer_s, before_s = at["fetched"] - at["fetch"], at["fetch"] - at["first fetch"]
    return {
        "committed, s": at["commit"],
        "imports, s": at["imported"],
        "model, s": at["made"] - at["imported"],
        "transfer, s": transfer_s,
        "MB/s": 2 * 4 * parameters / 1e6 / transfer_s,
        "before, s": before_s,
        "the rest, s": at["commit"] - at["made"] - transfer_s - before_s,
        "others, %": 100 * (disturbed / quiet - 1),
        "their wait, s": max(waits, default=0.0) - statistics.median(usual or [0.0]),
    }


def _work_s(others: Crew) -> tuple[float, list[float]]:
    """Mean seconds of an inner step without an outer one, of the slower of the two, and the waits of all outer steps,
    since it was asked last."""
    found, waits = [], []
    for answer in others.all("steps"):
        waits += answer["waits"]
        taken = sorted(stop - start for start, stop in answer["steps"])
        inner = taken[: len(taken) - len(taken) // EVERY - 1]  # without those that end in a round
        found.append(sum(inner) / len(inner))
    return max(found), waits
