"""What came of all cells: within the noise band or not, as a table and as JSON."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.harm.cells import METHODS, TARGETS, Cell
from benchmarks.harm.play import Outcome

MARGIN, PEAK_MARGIN = 1.25, 4.0
"""A loss is in the band up to this many times the worst of the clean runs, parameters up to this many times theirs."""


@dataclass(frozen=True)
class Band:
    """Losses, and the largest parameter, of clean runs of one configuration."""

    median: float
    worst: float
    peak: float
    runs: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Band:
        losses = [outcome.loss for outcome in outcomes]
        return cls(statistics.median(losses), max(losses), max(outcome.peak for outcome in outcomes), len(losses))

    @property
    def limit(self) -> float:
        return MARGIN * self.worst

    def or_wider(self, other: Band) -> Band:
        """With the worst of both."""
        return replace(self, worst=max(self.worst, other.worst), peak=max(self.peak, other.peak))


@dataclass(frozen=True)
class Judged:
    """A cell, what came of it, and what that is beside clean runs.

    Args:
        ratio: its loss to the clean runs' median.
        wrong: why it is out of line; empty: it is not.
        loss_is_high: whether it is so because of a loss that clean runs may have.
    """

    cell: Cell
    outcome: Outcome
    ratio: float
    wrong: str
    loss_is_high: bool = False

    @property
    def complaint(self) -> str:
        """One line; empty if it is in line."""
        detected = ", ".join(self.outcome.detected) or "nothing"
        return f"{self.cell.name}  {self.wrong}; detected: {detected}" if self.wrong else ""

    @property
    def detection(self) -> str:
        """The first event that says that something was found."""
        first = next(iter(self.outcome.detected), "")
        return first or ("none: harmless" if not self.wrong else "none")


def judge(cell: Cell, outcome: Outcome, band: Band) -> Judged:
    """Compares with clean runs."""
    ratio = outcome.loss / band.median if math.isfinite(outcome.loss) else math.inf
    wrong = ""
    if outcome.failed:
        wrong = outcome.failed
    elif not outcome.struck:
        wrong = "the bit was never flipped"
    elif not outcome.loss <= band.limit:
        wrong = f"loss {outcome.loss:.3g}, limit {band.limit:.3g}"
    elif not outcome.peak <= PEAK_MARGIN * band.peak:
        wrong = f"a parameter of {outcome.peak:.3g}, limit {PEAK_MARGIN * band.peak:.3g}"
    elif not outcome.equal:
        wrong = "survivors differ"
    elif outcome.lost:
        wrong = f"{outcome.lost} steps lost"
    high = not outcome.failed and band.limit < outcome.loss < math.inf
    return Judged(cell, outcome, ratio, wrong, loss_is_high=high)


def tables(judged: Sequence[Judged]) -> list[str]:
    """Markdown: a table a method, a row a target, columns of bits; then totals."""
    lines = []
    for method in METHODS:
        mine = [j for j in judged if j.cell.method == method]
        if not mine:
            continue
        lines += ["", f"{method}: {len(mine)} cells, {sum(bool(j.wrong) for j in mine)} out of line", ""]
        head = "| | " + " | ".join(name for name, _ in CLASSES) + " | detected by |"
        lines += [head, "|---" * (len(CLASSES) + 2) + "|"]
        for target in TARGETS:
            of = [j for j in mine if j.cell.target == target]
            if of:
                cells = [_worst([j for j in of if within(j.cell.bit)]) for _, within in CLASSES]
                lines.append(f"| `{target}` | " + " | ".join(cells) + f" | {_detections(of)} |")
    return lines


CLASSES: Sequence[tuple[str, Callable[[int], bool]]] = (
    ("0-10", lambda bit: bit < 11),
    ("11-22", lambda bit: 11 <= bit <= 22),
    ("23-26", lambda bit: 23 <= bit <= 26),
    ("27-29", lambda bit: 27 <= bit <= 29),
    ("30", lambda bit: bit == 30),
    ("31", lambda bit: bit == 31),
)
"""Columns: the mantissa's halves, the exponent's, its highest bit, the sign."""


def _worst(judged: Sequence[Judged]) -> str:
    if not judged:
        return ""
    worst, bad = max(j.ratio for j in judged), sum(bool(j.wrong) for j in judged)
    return _figure(worst) + (f" (**{bad}** of {len(judged)})" if bad else "")


def _figure(ratio: float) -> str:
    if not math.isfinite(ratio):
        return "inf"
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0e}"


def _detections(judged: Iterable[Judged]) -> str:
    found = Counter(j.detection for j in judged)
    return ", ".join(f"{name} {count}" for name, count in found.most_common())


def plain(judged: Sequence[Judged], bands: Mapping[str, Band]) -> dict[str, object]:
    """For JSON."""
    return {
        "bands": {key: asdict(band) for key, band in bands.items()},
        "cells": {
            j.cell.name: asdict(j.outcome) | {"ratio": j.ratio, "wrong": j.wrong, "detection": j.detection}
            for j in judged
        },
    }
