"""What a picture or a table shows of very many things, and no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from ftopt.watch.report.plot import WIDTH, Axis

T = TypeVar("T")
_ROWS = 60


class Ends(Generic[T]):
    """The first and the last of many rows, ``most`` in all."""

    def __init__(self, most: int = _ROWS) -> None:
        self.count = 0
        self._most = most
        self._first: list[T] = []
        self._last: deque[T] = deque(maxlen=most)

    def __iter__(self) -> Iterator[T]:
        return iter(self.some()[0])

    def add(self, row: T) -> None:
        """The next one."""
        self.count += 1
        if len(self._first) < self._most:
            self._first.append(row)
        else:
            self._last.append(row)

    def some(self) -> tuple[list[T], str]:
        """The rows, and what to say of those between that are left out."""
        if self.count <= self._most:
            return list(self._first), ""
        half = self._most // 2
        last = [*self._first, *self._last][-half:]
        return [*self._first[:half], *last], f" (the first {half} and the last {half} of {self.count:,})"


class Moments:
    """Moments as marks on an axis: those that fall on each other are one."""

    def __init__(self, x: Axis) -> None:
        self.count = 0
        self._x = x
        self._at: dict[float, float] = {}

    def __iter__(self) -> Iterator[float]:
        return iter(self._at.values())

    def add(self, t_s: float) -> None:
        self.count += 1
        self._at[round(WIDTH * self._x.part(t_s), 1)] = t_s


class Curve:
    """Points of a line: all of them, or of very many every second one, fourth one and so on."""

    def __init__(self, most: int) -> None:
        self._most, self._stride, self._count = most, 1, 0
        self.points: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """The next one."""
        if self._count % self._stride == 0:
            self.points.append((x, y))
            if len(self.points) >= 2 * self._most:
                del self.points[1::2]
                self._stride *= 2
        self._count += 1


class Greatest:
    """Of as many equal parts of ``count`` points, ``most`` of them, the greatest point of each."""

    def __init__(self, count: int, most: int) -> None:
        self._size = -(-count // most) if most and count > most else 1
        self._in_part = 0
        self.points: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """The next one."""
        if not self._in_part:
            self.points.append((x, y))
        elif y > self.points[-1][1]:
            self.points[-1] = x, y
        self._in_part = (self._in_part + 1) % self._size
