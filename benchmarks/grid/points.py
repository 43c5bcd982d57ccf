"""Which runs there are, in the order in which they are made: the most decisive ones first.

A rate is found by climbing with factors of two, at seed 0, from where the last family's climb ended; so the list
depends on the results so far.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.grid.loop import Point

OUTER: tuple[tuple[float, float, bool], ...] = (
    (1.0, 0.0, False),
    (1.0, 0.25, False),
    (1.0, 0.5, False),
    (0.7, 0.5, False),
    (0.7, 0.9, False),
    (0.7, 0.9, True),
)
"""Outer rate, Nesterov momentum, whether that falls to 0."""
PERIODS = (5, 10, 25, 50)
PARTS = (1.0, 0.5, 0.25, 0.125)
"""What the inner rates are multiplied with where the momentum is 0.9."""
LARGE = 0.9
SIZES = ((16, 600), (16, 2400), (64, 600), (64, 2400))
"""Batch and inner steps."""
RATE, MUON = 8e-3, 0.02
"""Where climbing begins: AdamW's, Muon's."""
TUNED_AT = (25, 1.0, 0.25)
"""Period, outer rate and momentum."""

Losses = Mapping[Point, float]


@dataclass(frozen=True)
class Family:
    """What shares an inner rate.

    Args:
        name: in tables.
        kind: see `Point`.
        muon: whether Muon has the matrices of the blocks.
        leads: whether the first tenth is synchronous.
    """

    name: str
    kind: str
    muon: bool = False
    leads: bool = False

    def point(self, batch: int, steps: int, seed: int = 0) -> Point:
        """At the rates where climbing begins, and of DiLoCo, at the outer settings."""
        h, eta, mu = TUNED_AT if self.kind == "diloco" else (0, 1.0, 0.0)
        lead = steps // 10 if self.leads else 0
        muon = MUON if self.muon else None
        point = Point(kind=self.kind, rate=RATE, muon=muon, batch=batch, steps=steps, seed=seed)
        return replace(point, lead=lead, h=h, eta=eta, mu=mu)


SYNC = Family("SyncSGD, AdamW", "sync")
BASES = (SYNC, Family("SyncSGD, Muon", "sync", muon=True), Family("one replica, AdamW", "alone"))
FAMILIES = (
    Family("AdamW", "diloco"),
    Family("Muon", "diloco", muon=True),
    Family("AdamW, first tenth synchronous", "diloco", leads=True),
    Family("Muon, first tenth synchronous", "diloco", muon=True, leads=True),
)


@dataclass(frozen=True)
class Wanted:
    """A run, and whether its rates are known already."""

    point: Point
    ready: bool = True


def climb(losses: Losses, start: Point, field: str) -> tuple[Point, list[Point]]:
    """The best point along one rate, and what is missing to be sure: its neighbours, at half and at twice the rate."""
    best = start
    while True:
        middle = getattr(best, field)
        around = [best, *(replace(best, **{field: middle * factor}) for factor in (0.5, 2.0))]
        if missing := [point for point in around if point not in losses]:
            return best, missing
        found = min(around, key=losses.__getitem__)
        if found == best:
            return best, []
        best = found


def tuned(losses: Losses, start: Point) -> tuple[Point, list[Point]]:
    """The same along Muon's rate, then along AdamW's."""
    if start.muon is not None:
        start, missing = climb(losses, start, "muon")
        if missing:
            return start, missing
    return climb(losses, start, "rate")


def points(base: Point, parts: Sequence[float] = PARTS) -> Iterator[Point]:
    """All outer settings and periods of a family at one seed."""
    for eta, mu, falling in OUTER:
        for part in parts if mu == LARGE else (1.0,):
            for h in PERIODS:
                yield replace(base, eta=eta, mu=mu, falling=falling, part=part, h=h)


def wanted(
    losses: Losses, seeds: int, sizes: Sequence[tuple[int, int]] = SIZES, families: Sequence[Family] = FAMILIES
) -> list[Wanted]:
    """All runs, done ones among them.

    Of each size: rates, baselines, then DiLoCo seed by seed. After the first size, at a large momentum only the part of
    the rate that was the best there; the other parts come at the very end.
    """
    found: list[Wanted] = []
    later: list[Wanted] = []
    for number in range(len(sizes)):
        best: dict[Family, Wanted] = {}
        rates: dict[Family, list[Wanted]] = {}
        for family in (*BASES, *families):
            begin = start(losses, family, sizes[: number + 1])
            point, missing = tuned(losses, begin.point)
            best[family] = Wanted(point, begin.ready and not missing)
            rates[family] = [Wanted(one, begin.ready) for one in missing]
            if family in BASES or number == 0:
                found += rates[family]
        for seed in range(seeds):
            found += [Wanted(replace(best[base].point, seed=seed), best[base].ready) for base in BASES]
        for seed in range(seeds):
            for family in families:
                found += rates[family]
                first = tuned(losses, start(losses, family, sizes[:1]).point)[0]
                for one in points(replace(best[family].point, seed=seed)):
                    at_once = number == 0 or one.mu != LARGE or one.part == best_part(losses, first, one, seeds)
                    (found if at_once else later).append(Wanted(one, best[family].ready))
    unique: dict[Point, Wanted] = {}
    for run in found + later:
        unique.setdefault(run.point, run)
    return list(unique.values())


def start(losses: Losses, family: Family, sizes: Sequence[tuple[int, int]]) -> Wanted:
    """Where a family's climb begins at the last size: where it ended at the one before."""
    point = family.point(*sizes[-1])
    if len(sizes) == 1:
        return Wanted(point)
    begin = start(losses, family, sizes[:-1])
    before, missing = tuned(losses, begin.point)
    return Wanted(replace(point, rate=before.rate, muon=before.muon), begin.ready and not missing)


def best_part(losses: Losses, base: Point, point: Point, seeds: int) -> float:
    """The part of the rate with the lowest loss at the outer settings and the period of ``point``."""

    def loss(part: float) -> float:
        like = replace(base, h=point.h, eta=point.eta, mu=point.mu, falling=point.falling, part=part)
        known = [losses[run] for seed in range(seeds) if (run := replace(like, seed=seed)) in losses]
        return statistics.median(known) if known else float("inf")

    return min(PARTS, key=loss)
