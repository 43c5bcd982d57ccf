"""The median, the 99th percentile and the extremes of any number of values, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

_EXACT = 10_000
_WIDTH = math.log(1.001)


class Spread:
    """Statistics of values that arrive one by one. For more values than ``exact``, by default as many as an ordinary
    run has, the median and the percentile are right to 0.1 %, or to the factor of which ``width`` is the logarithm; the
    rest is exact."""

    def __init__(self, *, exact: int | None = None, width: float | None = None) -> None:
        self._exact, self._width = _EXACT if exact is None else exact, width or _WIDTH
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = -math.inf
        self._values = array("d")
        self._parts: dict[int, tuple[float, int]] = {}  # of values within 0.1 %, the first one and their number

    def __bool__(self) -> bool:
        return self.count > 0

    def add(self, value: float, times: int = 1) -> None:
        self.count += times
        self.total += value * times
        self.least, self.most = min(self.least, value), max(self.most, value)
        self._put(value, times)

    def update(self, other: Spread) -> None:
        total = self.total + other.total
        self.count += other.count
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        for value, times in other.values():
            self._put(value, times)
        self.total = total

    def of(self) -> tuple[float, float, float]:
        """Median, 99th percentile and maximum of at least one value."""
        ranks = [(self.count - 1) // 2, self.count // 2, math.ceil(0.99 * self.count) - 1]
        found, before = list[float](), 0
        for value, times in sorted(self.values()):
            before += times
            while len(found) < len(ranks) and before > ranks[len(found)]:
                found.append(value)
        low, high, p99 = found
        return (low + high) / 2 if self.count % 2 == 0 else high, p99, self.most

    def _put(self, value: float, times: int) -> None:
        if not self._parts and len(self._values) + times <= self._exact:
            self._values.extend([value] * times)
            return
        for each in self._values:
            self._part(each, 1)
        del self._values[:]
        self._part(value, times)

    def _part(self, value: float, times: int) -> None:
        key = round(math.log(value) / self._width) if value > 1e-12 else -1_000_000
        first, so_far = self._parts.get(key, (value, 0))
        self._parts[key] = first, so_far + times

    def values(self) -> Iterator[tuple[float, int]]:
        """The values, and how often each has arrived."""
        yield from ((value, 1) for value in self._values)
        yield from list(self._parts.values())  # another thread may add some
