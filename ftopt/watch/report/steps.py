"""A replica's inner steps, compactly: millions of them fit."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

from ftopt.watch.jsonl import Line


@dataclass(slots=True)
class Steps:
    """The inner steps of one replica, over all its incarnations: an entry a step in each array."""

    t_s: array[float] = field(default_factory=lambda: array("d"))
    incarnation: array[int] = field(default_factory=lambda: array("q"))
    inner_step: array[int] = field(default_factory=lambda: array("q"))
    loss: array[float] = field(default_factory=lambda: array("d"))
    """NaN where there was none."""

    def __len__(self) -> int:
        return len(self.t_s)

    def lives(self) -> set[int]:
        """The incarnations that have taken any."""
        return set(self.incarnation)

    def between(self, start: float, stop: float) -> int:
        """How many steps were done after ``start``, until ``stop``."""
        return bisect_right(self.t_s, stop) - bisect_right(self.t_s, start)

    def add(self, t_s: float, incarnation: int, inner_step: int, loss: float) -> None:
        """One step."""
        self.t_s.append(t_s)
        self.incarnation.append(incarnation)
        self.inner_step.append(inner_step)
        self.loss.append(loss)


class _Incarnations(dict[int, Line]):
    """Number -> a step's line with that incarnation alone, one object for all its steps."""

    def __missing__(self, number: int) -> Line:
        return self.setdefault(number, {"incarnation": number})


INCARNATION = _Incarnations()
