"""Convergence after equal tokens and in equal time: held-out loss by method, on links of a given rate."""

from __future__ import annotations

import bisect
from dataclasses import replace
from pathlib import Path
from typing import Any

import ftopt
from benchmarks import pictures
from benchmarks.speed.figures import Row
from benchmarks.speed.links import linked
from benchmarks.training import Case

EVERY, STEPS, MBIT = 50, 600, 50
PARTS, POINTS = 6, 24
"""Turns that each way takes, and how often it is evaluated."""
_REPLICAS = 4
_OUTER = ftopt.outer.SGD(lr=1.0, momentum=0.25, nesterov=True)


def ways(every: int, steps: int, points: int) -> dict[str, Case]:
    """Each family at its best point of the grid in ``benchmarks/results/methods.md``, evaluated ``points`` times."""
    case = Case(
        recipe="adamw_bytes",
        method=ftopt.SyncSGD(clip_norm=1.0),
        lr=8e-3,
        replicas=_REPLICAS,
        steps=steps,
        eval_every=steps // points,
    )
    muon = replace(case, recipe="diloco_bytes", inner="recipe", lr=None)
    streaming = ftopt.StreamingDiLoCo(
        sync_every=every, delay=0, fragments=ftopt.fragments.Strided(n=3), outer=_OUTER, wait_for_result_s=600.0
    )
    overlapped = replace(streaming, delay=5)
    return {
        "SyncSGD": case,
        "LocalSGD": replace(case, method=ftopt.LocalSGD(sync_every=every)),
        "DiLoCo": replace(case, method=ftopt.DiLoCo(sync_every=every, outer=_OUTER)),
        "Streaming": replace(case, method=streaming),
        "+ delay": replace(case, method=overlapped),
        "+ fp4": replace(case, method=overlapped, codec="fp4"),
        "SyncSGD, Muon": muon,
        "DiLoCo, Muon": replace(muon, method=ftopt.DiLoCo(sync_every=every, outer=_OUTER)),
    }


ABOUT = (
    f"The byte GPT of `adamw_bytes` (131,000 parameters) on Python's own library source, {_REPLICAS} replicas of "
    f"batch 16, {STEPS} inner steps of each, AdamW at the learning rates of docs/methods.md, or the optimizers of "
    f"`diloco_bytes` (Muon for matrices), one seed; in turns, {STEPS // PARTS} steps at a time. Each replica is a "
    f"process in a network namespace behind a link of {MBIT} Mbit/s (`tc tbf`): seconds are measured on it, not "
    f"computed. SyncSGD sends after every step, the others every {EVERY} steps; Streaming in 3 fragments, its delay is "
    "5 steps. Loss: of the committed parameters, in nats per byte, after equal tokens. *when the first is done*: each "
    "method's loss at the time when the first is done."
)
GOALS = "to SyncSGD, as in docs/methods.md: LocalSGD <= 1.17, DiLoCo and the Streaming variants <= 1.175"
_QUICK = "SyncSGD", "DiLoCo", "+ fp4", "DiLoCo, Muon"
_DRAWN = {"DiLoCo, Muon": "DiLoCo, Muon", "SyncSGD, Muon": "SyncSGD, Muon", "SyncSGD": "SyncSGD, AdamW"}
_TRAINED = 2.6
"""A loss below which a curve is drawn: that of a model that has learned something."""


def run(quick: bool) -> list[Row]:
    """A row a way."""
    every, steps, points, parts, mbit = (8, 24, 3, 1, 200) if quick else (EVERY, STEPS, POINTS, PARTS, MBIT)
    numbers = {way: number for number, way in enumerate(ways(every, steps, points)) if not quick or way in _QUICK}
    seconds = dict.fromkeys(numbers, 0.0)
    with linked("benchmarks.speed.learner", _REPLICAS, {"ways": (every, steps, points)}) as links:
        links.rate(mbit)
        for _ in range(parts):
            for way, number in numbers.items():
                answers = links.crew.all(f"train {number} {steps // parts}")
                seconds[way] = max(each["seconds"] for each in answers)
        ends = {way: links.crew.all(f"end {number}")[0] for way, number in numbers.items()}
    return rows({way: end | {"seconds": seconds[way]} for way, end in ends.items()}, mbit)


def rows(found: dict[str, dict[str, Any]], mbit: int) -> list[Row]:
    """Of each way's ``curve`` (inner steps, seconds, loss), ``sent`` (bytes) and ``seconds``."""
    policy = found["SyncSGD"]
    first_s = min(each["seconds"] for each in found.values())
    return [
        {
            "way": way,
            "Mbit/s": mbit,
            "loss": each["curve"][-1][2],
            "to SyncSGD": each["curve"][-1][2] / policy["curve"][-1][2],
            "seconds": each["seconds"],
            "SyncSGD's / these": policy["seconds"] / each["seconds"],
            "loss when the first is done": loss_at(each["curve"], first_s),
            "sent a replica, MB": each["sent"] / 1e6,
            "curve": each["curve"],
        }
        for way, each in found.items()
    ]


def loss_at(curve: list[tuple[int, float, float]], at_s: float) -> float:
    """On the line between the points around it; before the first one its loss, after the last one that one's."""
    times = [point[1] for point in curve]
    after = bisect.bisect_left(times, at_s)
    if after in (0, len(curve)):
        return curve[min(after, len(curve) - 1)][2]
    (_, begin_s, high), (_, end_s, low) = curve[after - 1 : after + 1]
    return high + (low - high) * (at_s - begin_s) / (end_s - begin_s)


def draw(rows: list[Row], path: Path) -> None:
    """Loss over seconds."""
    curves = {row["way"]: [(at_s, loss) for _, at_s, loss in row["curve"] if loss < _TRAINED] for row in rows}
    shown = {label: (points, []) for way, label in _DRAWN.items() if (points := curves.get(way))}
    x = f"seconds, behind links of {rows[0]['Mbit/s']} Mbit/s"
    pictures.course(shown, path, x=x, y="held-out loss, nats per byte")
