"""Compact memory of a long job: rows of each version, and whole numbers as ranges."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

WINDOW = 256
"""A restarted coordinator may repeat this number of its newest decisions; an older version that is made again is
another history."""


class Versions:
    """Rows of whole numbers for each version. ``columns``: the type of each number in a row, as `array` has it."""

    def __init__(self, columns: str) -> None:
        self.numbers = array("q")
        """The versions, in order."""
        self._ends = array("q")
        self._columns = [array(each) for each in columns]

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self) -> Iterator[tuple[int, ...]]:
        """All rows, in the order of versions."""
        return zip(*self._columns, strict=True)

    def last(self) -> tuple[int, ...] | None:
        """The last row of all."""
        return tuple(column[-1] for column in self._columns) if self._columns[0] else None

    def put(self, version: int, rows: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Sets the rows of a version; returns its former rows."""
        at, new = bisect_left(self.numbers, version), list(rows)
        start = end = self._ends[at - 1] if at else 0
        if self.numbers[at : at + 1] == array("q", [version]):
            end = self._ends[at]
        else:
            self.numbers.insert(at, version)
            self._ends.insert(at, start)
        before = self._replace(start, end, new)
        for later in range(at, len(self)):
            self._ends[later] += len(new) - (end - start)
        return before

    def go_back(self, last: int) -> list[tuple[int, ...]]:
        """Forgets all versions after ``last``; returns their rows."""
        at = bisect_right(self.numbers, last)
        start = self._ends[at - 1] if at else 0
        del self.numbers[at:], self._ends[at:]
        return self._replace(start, None, [])

    def _replace(self, start: int, end: int | None, new: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        before = list(zip(*(column[start:end] for column in self._columns), strict=True))
        for number, column in enumerate(self._columns):
            column[start:end] = array(column.typecode, (row[number] for row in new))
        return before


Range = tuple[int, int]
"""``start .. stop - 1``."""


class Numbers:
    """A set of whole numbers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[Range]:
        return iter(zip(self._starts, self._stops, strict=True))

    def add(self, number: int) -> None:
        at = bisect_right(self._starts, number)
        if at and number < self._stops[at - 1]:
            return
        if at and self._stops[at - 1] == number:
            self._stops[at - 1] += 1
        else:
            self._starts.insert(at, number)
            self._stops.insert(at, number + 1)
            at += 1
        if at < len(self._starts) and self._starts[at] == self._stops[at - 1]:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]


def without(ranges: Iterable[Range], known: Iterable[Range]) -> list[Range]:
    """The parts of ``ranges`` that are not in ``known``."""
    left = list(ranges)
    for start, stop in known:
        parts = ((a, min(b, start)) for a, b in left), ((max(a, stop), b) for a, b in left)
        left = [(a, b) for part in parts for a, b in part if a < b]
    return left
