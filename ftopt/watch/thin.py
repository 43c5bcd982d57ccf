"""Reduces very many points or rows to what a picture or a table shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
_ROWS = 60


class Thinned(Generic[T]):
    """All points; if there are very many, ``merge`` makes one of two neighbours, which leaves from ``most`` to twice as
    many. ``stride``: how many of the ``count`` points added make one of ``points``."""

    def __init__(self, most: int, merge: Callable[[T, T], T]) -> None:
        self.most, self._merge, self._in_last = most, merge, 0
        self.points: list[T] = []
        self.count, self.stride = 0, 1

    def add(self, point: T) -> None:
        self.count += 1
        if self._in_last:
            self.points[-1] = self._merge(self.points[-1], point)
        else:
            self.points.append(point)
        self._in_last = (self._in_last + 1) % self.stride
        if not self._in_last and len(self.points) >= 2 * self.most:
            self.points = [self._merge(a, b) for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self.stride *= 2


class Ends(Generic[T]):
    """The first and the last of many rows, ``most`` in all."""

    def __init__(self, most: int = _ROWS) -> None:
        self.count = 0
        self._most = most
        self._first: list[T] = []
        self._last: deque[T] = deque(maxlen=most)

    def add(self, row: T) -> None:
        self.count += 1
        (self._first if len(self._first) < self._most else self._last).append(row)

    def some(self) -> tuple[list[T], str]:
        """The rows, and a remark about the ones left out between them."""
        if self.count <= self._most:
            return list(self._first), ""
        half = self._most // 2
        last = [*self._first, *self._last][-half:]
        return [*self._first[:half], *last], f" (the first {half} and the last {half} of {self.count:,})"


def ends(rows: Sequence[T]) -> tuple[list[T], str]:
    """The same for rows that are all in memory."""
    found = Ends[T]()
    for row in rows:
        found.add(row)
    return found.some()
