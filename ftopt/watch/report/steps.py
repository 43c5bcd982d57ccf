"""A replica's inner steps, stored compactly, so that millions fit in memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(slots=True)
class Steps:
    """The inner steps of one replica, over all its incarnations: one entry per step in each array."""

    t_s: array[float] = field(default_factory=lambda: array("d"))
    incarnation: array[int] = field(default_factory=lambda: array("q"))
    inner_step: array[int] = field(default_factory=lambda: array("q"))
    loss: array[float] = field(default_factory=lambda: array("d"))
    """NaN if the step had none."""

    def __len__(self) -> int:
        return len(self.t_s)

    def between(self, start: float, stop: float) -> int:
        """The number of steps done after ``start``, until ``stop``."""
        return bisect_right(self.t_s, stop) - bisect_right(self.t_s, start)

    def first_after(self, t_s: float, incarnation: int) -> float | None:
        """When a later incarnation took its first step after ``t_s``; None: never."""
        later = range(bisect_right(self.t_s, t_s), len(self))
        return next((self.t_s[n] for n in later if self.incarnation[n] > incarnation), None)

    def add(self, t_s: float, incarnation: int, inner_step: int, loss: float) -> None:
        self.t_s.append(t_s)
        self.incarnation.append(incarnation)
        self.inner_step.append(inner_step)
        self.loss.append(loss)
