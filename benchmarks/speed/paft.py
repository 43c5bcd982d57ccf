"""What PAFT's averages of the parameters add to a step, by number of replicas, behind links of a given rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import ftopt
from benchmarks.speed.figures import QUICK_REPETITIONS, Row, Spread, ratio
from benchmarks.speed.linked import serve
from benchmarks.speed.links import linked

REPLICAS = (4, 8, 16)
EVERY, MBIT, PARAMETERS = 5, 100, 250_000
STEP_S = 0.1
REPETITIONS = 3
METHODS = {
    "SyncSGD": ftopt.SyncSGD(verify_every=None),
    "PAFT": ftopt.PAFT(sync_every=EVERY),
    "PAFT, delay 1": ftopt.PAFT(sync_every=EVERY, delay=1),
}
PUBLISHED: Mapping[int, tuple[float, ...]] = {
    4: (0.201, 0.243, 0.237),
    8: (0.212, 0.254, 0.244),
    16: (0.228, 0.276, 0.253),
}
"""Replicas -> seconds a step of DSGD, PAFT-Sync and PAFT-Dyn in the paper, on other machines than ours."""
ABOUT = (
    f"Replicas in network namespaces, each behind a link of {MBIT} Mbit/s (`tc tbf`), {PARAMETERS:,} parameters; "
    f"forward and backward pass are a wait of {1000 * STEP_S:g} ms. All average gradients in each step, PAFT also its "
    f"parameters every {EVERY} steps, which are as many bytes again. "
    "*s*: seconds a step. *ratio*: to SyncSGD's, in turns. *published*: the paper's ratio (OpenReview cPZepCZlFW), of "
    "PAFT-Sync and PAFT-Dyn, whose period a trigger chooses."
)
GOALS = "ratio: no higher than published"
PAGE = "methods.md"
DRAWN = "s"
_PATIENT = ftopt.FaultPolicy(dead_after_s=120.0, grace_s=120.0, heartbeat_s=2.0, stragglers="wait")


def run(quick: bool) -> list[Row]:
    """A row a number of replicas and method."""
    sizes, parameters, repetitions = ((3,), 20_000, QUICK_REPETITIONS) if quick else (REPLICAS, PARAMETERS, REPETITIONS)
    return [row for size in sizes for row in _measure(size, parameters, repetitions)]


def _measure(replicas: int, parameters: int, repetitions: int) -> list[Row]:
    policy = asdict(_PATIENT) | {"start_replicas": replicas}
    found: dict[str, list[float]] = {way: [] for way in METHODS}
    with linked(__name__, replicas, {"parameters": parameters, "step_s": STEP_S, "policy": policy}) as links:
        links.rate(MBIT)
        for number in range(len(METHODS)):
            links.crew.all(f"begin {number} {EVERY}")
        for _ in range(repetitions + 1):
            for number, way in enumerate(METHODS):
                of_members = links.crew.all(f"run {number} {EVERY} 2")
                found[way].append(max(sum(all_s for _, all_s in times) for times in of_members) / (2 * EVERY))
    published = dict(zip(METHODS, PUBLISHED.get(replicas, ()), strict=False))
    rows: list[Row] = []
    for way, seconds in found.items():
        theirs = published[way] / published["SyncSGD"] if published else None
        row: Row = {"replicas": replicas, "way": way, "s": Spread.of(seconds[1:])}
        rows.append({**row, "ratio": ratio(seconds[1:], found["SyncSGD"][1:]), "published": theirs})
    return rows


if __name__ == "__main__":
    serve(lambda number, every: list(METHODS.values())[number])
