"""Repetitions in turns, their medians and spreads, and rows of such figures as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

K = TypeVar("K", bound=Hashable)

REPETITIONS = 9
FEWER_REPETITIONS = 7
"""Of what takes seconds each."""
QUICK_REPETITIONS = 3
"""With ``--quick``: enough to see that it works."""

Row = dict[str, Any]
"""Column -> text, number, `Spread`, or a list that is kept and drawn, not shown. All rows have the same columns."""


class NotHereError(RuntimeError):
    """This machine lacks what a benchmark needs."""


@dataclass(frozen=True)
class Spread:
    """A measured figure.

    Args:
        median: over the repetitions.
        low: first quartile.
        high: third quartile.
        repetitions: how many.
    """

    median: float
    low: float
    high: float
    repetitions: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of repetitions that were taken in turns: each to the one beside it."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def in_turns(works: Mapping[K, Callable[[], float]], repetitions: int, *, warm: int = 2) -> dict[K, list[float]]:
    """What each work returns (seconds), after ``warm`` rounds that are thrown away; the order turns each round."""
    found: dict[K, list[float]] = {name: [] for name in works}
    names = list(works)
    for round in range(warm + repetitions):
        for name in names if round % 2 else reversed(names):
            taken = works[name]()
            if round >= warm:
                found[name].append(taken)
    return found


def number(value: float) -> str:
    """Three digits or so."""
    if abs(value) < 0.001:
        return f"{value:.3f}" if value else "0"
    if abs(value) < 10:
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown."""
    columns = [column for column, value in rows[0].items() if not isinstance(value, list)]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return lines + ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]


def plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{key: vars(v) if isinstance(v, Spread) else v for key, v in row.items()} for row in rows]


def drawn(rows: Sequence[Row], column: str) -> dict[str, tuple[float, float, float]]:
    """Median and quartiles of a column, by the texts of its row, with its whole numbers where texts are alike."""

    def texts(row: Row) -> list[str]:
        return [v for key, v in row.items() if key != column and isinstance(v, str)]

    alike = len({tuple(texts(row)) for row in rows}) < len(rows)
    found = {}
    for row in rows:
        whole = [f"{v:,} {key}" for key, v in row.items() if alike and key != column and isinstance(v, int)]
        label = ", ".join([*texts(row), *whole])
        value = row[column]
        if isinstance(value, Spread):
            found[label] = (value.median, value.low, value.high)
        elif isinstance(value, int | float):
            found[label] = (value, value, value)
    return found


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
