"""Copies for replay, once a round and more often: what they cost, and how many steps a death leaves to do again."""

from __future__ import annotations

import statistics
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ftopt
from benchmarks.speed.figures import Row, Spread, ratio
from ftopt.sync.protocol.samples import Samples
from tests.sync.processes.job import tiny_job

EVERY = 40
STEP_S = 0.02
REPETITIONS = 3
WIDTH = 10_000
POLICY: dict[str, Any] = {
    "grace_s": 30.0, "heartbeat_s": 0.25, "dead_after_s": 20.0, "start_s": 120.0, "recovery_s": 30.0,
    "start_replicas": 3,
}  # fmt: skip
SAMPLES = Samples(samples=100_000, batch_size=4)
WAYS = {"drop": None, "round": EVERY, "H/2": EVERY // 2, "H/4": EVERY // 4, "H/10": EVERY // 10}
ABOUT = (
    f"Three replicas, real processes, AdamW on 0.17 million parameters, inner steps of {1000 * STEP_S:.0f} ms and a "
    f"round every H={EVERY} of them. *drop*: no copies; *round*: a copy at the start of each round; H/2 to H/10: "
    "`policy.copy_every`. *bytes*: what goes to the neighbour, per copy and per inner step. *copying*: what a copy "
    "keeps the training thread for; *step*: the time of a step, all of this and the outer steps included, as a ratio "
    "to *drop*. *again*: if a replica died at any moment of the run, evenly, so many of its inner steps would have to "
    "be done again (*drop*: would be lost, with the samples handed on); mean, and the largest. They are those after "
    "the newest copy that the neighbour had, and after what was committed."
)
GOALS = "again: no more than copy_every, and the steps that fetching takes"
PAGE = "checkpoints.md"
DRAWN = "again, mean"


def run(quick: bool) -> list[Row]:
    """A row a way; the ways take turns."""
    repetitions, rounds = (2, 2) if quick else (REPETITIONS, 4)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(repetitions):
        for way in WAYS if number % 2 else reversed(WAYS):
            found[way].append(_measure(way, rounds))
    return [_row(way, found) for way in WAYS]


def _row(way: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> Row:
    each, bare = found[way], found["drop"]

    def spread(what: str) -> Spread | None:
        return None if way == "drop" and what != "again" else Spread.of([x[what] for x in each])

    return {
        "copies": way,
        "every, steps": WAYS[way],
        "MB per copy": spread("mb"),
        "kB per step": spread("kb_per_step"),
        "copying, ms": spread("copy_ms"),
        "step / drop": ratio([x["step_s"] for x in each], [x["step_s"] for x in bare]),
        "again, mean": spread("again"),
        "again, largest": round(max(x["most"] for x in each)),
    }


def _measure(way: str, rounds: int) -> dict[str, float]:
    settings: dict[str, Any] = POLICY | {"recover": "drop" if way == "drop" else "replay"}
    if way not in ("drop", "round"):
        settings["copy_every"] = WAYS[way]
    options: dict[str, Any] = {"samples": SAMPLES, "steps": EVERY * rounds * 3, "step_s": STEP_S, "width": WIDTH}
    method, policy = ftopt.DiLoCo(sync_every=EVERY), ftopt.FaultPolicy(**settings)
    with (
        tempfile.TemporaryDirectory(prefix="ftopt-bench-") as name,
        tiny_job(Path(name), policy=policy, method=method, **options) as job,
    ):
        job.start_all()
        job.end()
        return figures(job.events(), {who: job.trained(who, since={"t_s": 0.0}) for who in job.names})


def figures(events: Sequence[Mapping[str, Any]], steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Of a run's record; from the second round on."""
    copied = [e for e in events if e["event"] == "copied"]
    again = [x for who, lines in steps.items() for x in to_do_again(who, events, [line["t_s"] for line in lines])]
    count = sum(map(len, steps.values()))
    return {
        "mb": statistics.mean(e["data"]["bytes"] for e in copied) / 1e6 if copied else 0.0,
        "kb_per_step": sum(e["data"]["bytes"] for e in copied) / count / 1e3,
        "copy_ms": 1e3 * statistics.median(e["data"]["stall_s"] for e in copied) if copied else 0.0,
        "step_s": statistics.mean((x[-1]["t_s"] - x[0]["t_s"]) / (len(x) - 1) for x in steps.values()),
        "again": statistics.mean(again),
        "most": max(again),
    }


def to_do_again(who: str, events: Sequence[Mapping[str, Any]], stepped: Sequence[float]) -> list[int]:
    """For a death at each of the moments ``stepped``, after a step: the steps after the newest copy that a neighbour
    had by then, or after those that were committed, whichever are fewer. From the first commit on."""
    safe: list[tuple[float, int]] = []
    newest = 0
    for e in events:
        if e["event"] == "copied" and e["replica"] == who:
            newest = bisect_right(stepped, e["t_s"])
        elif e["event"] == "kept" and e["replica"] == who:
            safe.append((e["t_s"], newest))
        elif e["event"] == "decide":
            safe += [(e["t_s"], last) for name, _, _, last, *_ in e["data"]["members"] if name == who]
    safe.sort()
    moments = [at for at, _ in safe]
    found = []
    for number, at in enumerate(stepped, 1):
        until = bisect_right(moments, at)
        if until:
            found.append(max(0, number - max(step for _, step in safe[:until])))
    return found
