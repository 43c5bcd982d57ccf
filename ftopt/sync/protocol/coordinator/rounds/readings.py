"""Readings: the numbers that triggers need, the last ones of each replica, and their means.

They are hints. No decision depends on them, so they are neither journalled nor repeated: a member that is back reads
again.
"""

from __future__ import annotations

import math

from ftopt.sync.protocol import messages as m

REFRESH_S = 0.05
"""Seconds between two computations of means, however many replicas ask."""


class Readings:
    """The readings of one fragment, from replicas that hold one version."""

    def __init__(self, fragment: int) -> None:
        self._fragment = fragment
        self._at: m.Position | None = None
        self._values: dict[str, tuple[float, ...]] = {}
        self._means: m.Means | None = None
        self._made_s = -math.inf

    def take(self, now: float, at: m.Position, replica: str, values: tuple[float, ...]) -> m.Means:
        """Takes a replica's numbers; returns the means over all. Drops numbers of another version than ``at``."""
        if self._at != at:
            self._at, self._values, self._means = at, {}, None
        self._values[replica] = values
        if self._means is None or now >= self._made_s + REFRESH_S:
            self._means, self._made_s = self._make(at.version), now
        return self._means

    def drop(self, replica: str) -> None:
        if self._values.pop(replica, None) is not None:
            self._means = None

    def _make(self, version: int) -> m.Means:
        """Computes the means of as many numbers as all have sent."""
        columns = zip(*self._values.values(), strict=False)
        count = len(self._values)
        return m.Means(self._fragment, version, count, tuple(math.fsum(column) / count for column in columns))
