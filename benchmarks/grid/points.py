"""Which runs there are, in the order in which they are made: the most decisive ones first.

A rate is found by climbing with factors of two at seed 0, from where another climb ended; so the list depends on the
results so far.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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
FIRST_PERIODS, FIRST_PARTS = (10, 50), (1.0, 0.25)
"""Those that are trained before the ones between them."""
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


def points(base: Point) -> list[Point]:
    """All outer settings and periods of a family at one seed; those between others come last."""
    found = [
        replace(base, eta=eta, mu=mu, falling=falling, part=part, h=h)
        for eta, mu, falling in OUTER
        for part in (PARTS if mu == LARGE else (1.0,))
        for h in PERIODS
    ]
    return sorted(found, key=layer)


def layer(point: Point) -> int:
    """0 to 3: how late a setting comes."""
    if point.h in FIRST_PERIODS and point.part in FIRST_PARTS:
        return FIRST_PARTS.index(point.part)
    return 2 if point.part == 1 else 3


def wanted(
    losses: Losses, seeds: int, sizes: Sequence[tuple[int, int]] = SIZES, families: Sequence[Family] = FAMILIES
) -> list[Wanted]:
    """All runs, done ones among them: of each size the rates, then seed by seed the baselines and DiLoCo.

    After the first size, at a large momentum only the part of the rate that was the best there; the other parts come at
    the very end.
    """
    found: list[Wanted] = []
    later: list[Wanted] = []
    for number in range(len(sizes)):
        best: dict[Family, Wanted] = {}
        for family in (*BASES, *families):
            begin = start(losses, family, sizes[: number + 1])
            point, missing = tuned(losses, begin.point)
            best[family] = Wanted(point, begin.ready and not missing)
            found += [Wanted(one, begin.ready) for one in missing]
        firsts = {family: tuned(losses, start(losses, family, sizes[:1]).point)[0] for family in families}
        for seed in range(seeds):
            found += [Wanted(replace(best[base].point, seed=seed), best[base].ready) for base in BASES]
            every = [
                (family, Wanted(point, best[family].ready))
                for family in families
                for point in points(replace(best[family].point, seed=seed))
            ]
            for family, run in sorted(every, key=lambda one: layer(one[1].point)):
                at_once = number == 0 or run.point.mu != LARGE
                if not at_once:
                    at_once = run.point.part == best_part(losses, firsts[family], run.point, seeds)
                (found if at_once else later).append(run)
    unique: dict[Point, Wanted] = {}
    for run in found + later:
        unique.setdefault(run.point, run)
    return list(unique.values())


def start(losses: Losses, family: Family, sizes: Sequence[tuple[int, int]]) -> Wanted:
    """Where a family's climb begins at the last size: where it ended at the one before; at the first size, where that
    of the family without a synchronous beginning ended."""
    point = family.point(*sizes[-1])
    if len(sizes) > 1:
        sizes = sizes[:-1]
    elif family.leads:
        family = next(other for other in FAMILIES if other.muon == family.muon and not other.leads)
    else:
        return Wanted(point)
    begin = start(losses, family, sizes)
    before, missing = tuned(losses, begin.point)
    return Wanted(replace(point, rate=before.rate, muon=before.muon), begin.ready and not missing)


def best_part(losses: Losses, base: Point, point: Point, seeds: int) -> float:
    """The part of the rate with the lowest loss at the outer settings and the period of ``point``."""

    def loss(part: float) -> float:
        like = replace(base, h=point.h, eta=point.eta, mu=point.mu, falling=point.falling, part=part)
        known = [losses[run] for seed in range(seeds) if (run := replace(like, seed=seed)) in losses]
        return statistics.median(known) if known else float("inf")

    return min(PARTS, key=loss)
