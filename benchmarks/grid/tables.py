"""The grid's tables and its picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from benchmarks import pictures
from benchmarks.grid.loop import Point
from benchmarks.grid.points import BASES, FAMILIES, OUTER, PERIODS, SIZES, SYNC, Family, Losses, points, start, tuned

GAINS = (1.0, 1.5, 2.0, 4.0, 7.0)
SHARES = (0.02, 0.1, 0.3, 1.0)
"""Limits of the rows and columns that settings are counted in."""


@dataclass(frozen=True)
class Cell:
    """A setting's loss over the seeds.

    Args:
        losses: of the seeds that are done.
        gaps: the same over those of SyncSGD with AdamW at the same seed, minus 1.
    """

    losses: Sequence[float]
    gaps: Sequence[float]

    @property
    def loss(self) -> float:
        """The median."""
        return statistics.median(self.losses)

    @property
    def gap(self) -> float:
        """The median."""
        return statistics.median(self.gaps)

    def __str__(self) -> str:
        """Median loss, median gap, half the range of the gaps."""
        if self.gap == math.inf:
            return "broke down"
        spread = (max(self.gaps) - min(self.gaps)) / 2
        told = f"{self.loss:.3f} {self.gap:+.1%}"
        return told + (f" ±{100 * spread:.1f}" if len(self.gaps) > 1 else " (one seed)")


class Size:
    """What is known of a batch and a number of inner steps.

    Args:
        losses: of all runs.
        number: which of `SIZES`.
        seeds: those that count.
    """

    def __init__(self, losses: Losses, number: int, seeds: int) -> None:
        self._losses, self._seeds = losses, seeds
        self._sizes = SIZES[: number + 1]
        self.batch, self.steps = SIZES[number]
        self._sync = self.base(SYNC)

    def base(self, family: Family) -> Point:
        """The family's rates, as far as they are known, at seed 0."""
        return tuned(self._losses, start(self._losses, family, self._sizes).point)[0]

    def cell(self, point: Point) -> Cell | None:
        """None if nothing is known."""
        pairs = [
            (self._losses[own], self._losses[sync])
            for seed in range(self._seeds)
            if (own := replace(point, seed=seed)) in self._losses
            and (sync := replace(self._sync, seed=seed)) in self._losses
        ]
        return Cell([own for own, _ in pairs], [own / sync - 1 for own, sync in pairs]) if pairs else None

    def rows(self, family: Family) -> list[tuple[Point, dict[int, Cell]]]:
        """Of a DiLoCo family: each outer setting and part of the rate, with its cells by period; by ``part * gain``."""
        found: dict[Point, dict[int, Cell]] = {}
        for point in points(self.base(family)):
            if cell := self.cell(point):
                found.setdefault(replace(point, h=0), {})[point.h] = cell
        return sorted(found.items(), key=lambda row: (-row[0].part * row[0].gain, row[0].falling))

    def best(self, family: Family) -> Iterator[tuple[str, dict[int, Cell]]]:
        """Each outer setting at the best part of the rate."""
        rows = self.rows(family)
        for eta, mu, falling in OUTER:
            cells: dict[int, Cell] = {}
            for point, by_period in rows:
                if (point.eta, point.mu, point.falling) == (eta, mu, falling):
                    for h, cell in by_period.items():
                        cells[h] = min(cells.get(h, cell), cell, key=lambda one: one.gap)
            if cells:
                yield _outer(eta, mu, falling), dict(sorted(cells.items()))


def all_of(losses: Losses, seeds: int) -> list[str]:
    """Markdown: of each size a table of the baselines, and one of each family."""
    return [line for number in range(len(SIZES)) for line in _of(Size(losses, number, seeds))]


def _of(size: Size) -> Iterator[str]:
    bases = [(family, cell) for family in BASES if (cell := size.cell(size.base(family)))]
    if not bases:
        return
    yield f"## Batch {size.batch}, {size.steps:,} inner steps"
    yield ""
    yield "| | inner rate | held-out loss, to SyncSGD with AdamW |"
    yield "|---|---|---|"
    for family, cell in bases:
        yield f"| {family.name} | {_rates(size.base(family))} | {cell} |"
    for family in FAMILIES:
        rows = size.rows(family)
        if not rows:
            continue
        best = {h: min((cells[h].gap for _, cells in rows if h in cells), default=None) for h in PERIODS}
        yield ""
        yield f"**DiLoCo, {family.name}**, inner rate {_rates(size.base(family))}"
        yield ""
        yield "| outer | x rate | rate x gain | memory / run | " + " | ".join(f"H {h}" for h in PERIODS) + " |"
        yield "|---" * (4 + len(PERIODS)) + "|"
        for point, cells in rows:
            shares = [replace(point, h=h).memory / size.steps for h in (PERIODS[0], PERIODS[-1])]
            told = [
                _outer(point.eta, point.mu, point.falling),
                str(Fraction(point.part)),
                f"{point.part * point.gain:.3g}",
            ]
            told.append("-".join(f"{100 * share:.0f}" for share in shares) + " %")
            told += [_cell(cells.get(h), best[h]) for h in PERIODS]
            yield f"| {' | '.join(told)} |"
    yield ""
    yield from _rules(size)


def _rules(size: Size) -> Iterator[str]:
    """How far settings are above the best one of their family and period, by what they multiply and remember."""
    found: dict[tuple[int, int], list[float]] = {}
    for family in FAMILIES:
        rows = size.rows(family)
        for h in PERIODS:
            cells = {replace(point, h=h): of_periods[h] for point, of_periods in rows if h in of_periods}
            best = min((cell.loss for cell in cells.values()), default=math.inf)
            for point, cell in cells.items():
                place = _bin(point.part * point.gain, GAINS), _bin(point.memory / size.steps, SHARES)
                found.setdefault(place, []).append(cell.loss / best - 1)
    if not found:
        return
    yield "Above the best of the same family and period: median, worst, number of settings"
    yield ""
    yield "| rate x gain | " + " | ".join(f"memory / run at most {share:.0%}" for share in SHARES) + " |"
    yield "|---" * (1 + len(SHARES)) + "|"
    for row, gain in enumerate(GAINS):
        told = [found.get((row, column)) for column in range(len(SHARES))]
        if any(told):
            cells_told = [f"{statistics.median(x):.1%}, {max(x):.1%}, {len(x)}" if x else "" for x in told]
            yield f"| at most {gain:g} | {' | '.join(cells_told)} |"
    yield ""


def _bin(value: float, limits: Sequence[float]) -> int:
    return next(number for number, limit in enumerate(limits) if value <= limit + 1e-9)


def _cell(cell: Cell | None, best: float | None) -> str:
    if cell is None:
        return ""
    return f"**{cell}**" if cell.gap == best else str(cell)


def _outer(eta: float, mu: float, falling: bool) -> str:
    return f"({eta:g}, {mu:g}{' to 0' if falling else ''})"


def _rates(point: Point) -> str:
    return f"{point.rate:g}" if point.muon is None else f"Muon {point.muon:g}, AdamW {point.rate:g}"


def draw(losses: Losses, seeds: int, path: Path) -> bool:
    """Of the first size: the gap to SyncSGD by period, a panel a family. Whether there is a picture."""
    size = Size(losses, 0, seeds)
    flat = {family.name: cell for family in BASES[1:] if (cell := size.cell(size.base(family)))}
    panels = []
    for family in FAMILIES:
        curves = {name: _percent(cells.items()) for name, cells in size.best(family)}
        if curves:
            curves |= {name: _percent((h, cell) for h in PERIODS) for name, cell in flat.items()}
            y = f"held-out loss above SyncSGD's, %: {family.name}"
            panels.append(pictures.Panel(curves=curves, x="H, inner steps between two outer steps", y=y, scale="log"))
    return bool(panels) and pictures.lines(panels, path)


def _percent(cells: Iterable[tuple[int, Cell]]) -> list[tuple[float, float]]:
    return [(h, 100 * cell.gap) for h, cell in cells]
