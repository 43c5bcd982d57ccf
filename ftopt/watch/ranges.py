"""Whole numbers as ranges: millions of consecutive numbers take the space of one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

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
        joins_before = at > 0 and self._stops[at - 1] == number
        joins_after = at < len(self._starts) and self._starts[at] == number + 1
        if joins_before and joins_after:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif joins_before:
            self._stops[at - 1] = number + 1
        elif joins_after:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._stops.insert(at, number + 1)


def without(ranges: Iterable[Range], known: Iterable[Range]) -> list[Range]:
    """The parts of ``ranges`` that are not in ``known``."""
    left = list(ranges)
    for start, stop in known:
        parts = ((a, min(b, start)) for a, b in left), ((max(a, stop), b) for a, b in left)
        left = [(a, b) for part in parts for a, b in part if a < b]
    return left
