"""The numbers that triggers go by: the last ones of each replica, and their means.

They are hints. Nothing that is decided depends on them, so they are neither journalled nor repeated: a member that is
back reads anew.
"""

from __future__ import annotations

import math

from ftopt.sync.protocol import messages as m

REFRESH_S = 0.05
"""Means are made at most once in so long, however many replicas ask."""


class Readings:
    """Of one fragment: numbers of replicas that hold one version."""

    def __init__(self, fragment: int) -> None:
        self._fragment = fragment
        self._at: m.Position | None = None
        self._values: dict[str, tuple[float, ...]] = {}
        self._means: m.Means | None = None
        self._made_s = -math.inf

    def take(self, now: float, at: m.Position, replica: str, values: tuple[float, ...]) -> m.Means:
        """A replica's numbers; returns everybody's means. Those of another version than ``at`` are over."""
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
        """Of as many numbers as all have sent."""
        columns = zip(*self._values.values(), strict=False)
        count = len(self._values)
        return m.Means(self._fragment, version, count, tuple(math.fsum(column) / count for column in columns))
