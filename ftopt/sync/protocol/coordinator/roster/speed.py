"""How long a member's steps take, as a multiple of the usual time in the job; see `speeds`."""

from __future__ import annotations

import math
from dataclasses import dataclass

SLOW, FAST = 1.5, 1.25
KNOWN = 10
"""Heartbeats after which a member's usual factor is known."""
MEMORY = 0.05
"""Weight of one heartbeat in the usual factor."""
ALIKE = 1.2
"""Once the usual factor is known, a factor above this multiple of it is not learnt: the member may become slow."""


@dataclass(slots=True)
class Speed:
    """The speed of one incarnation. ``factor``: the newest, 0 while unknown. ``kept_waiting``: a round has waited for
    it. ``since_s``: when the heartbeats that made it slow began."""

    factor: float = 0.0
    usual_factor: float = 0.0
    reports: int = 0
    slow: bool = False
    kept_waiting: bool = False
    since_s: float = math.inf
    turned: int = 0
    """Heartbeats in a row that speak for the other state, slow or not; the first came at ``turned_s``."""
    turned_s: float = math.inf
    seen_step: int = -1

    @property
    def before(self) -> float:
        """Its usual factor so far; 0: not known."""
        return self.usual_factor if self.reports >= KNOWN else 0.0

    def turns(self) -> bool:
        """Whether the newest factor speaks for the other state."""
        if self.slow:
            return self.factor < FAST
        worse = self.factor >= SLOW * self.before > 0
        return self.factor >= SLOW and (worse or self.kept_waiting)

    def learn(self) -> None:
        """Adds the newest factor to the usual one."""
        if self.factor > ALIKE * self.before > 0:
            return
        self.reports += 1
        self.usual_factor += (self.factor - self.usual_factor) * max(1 / self.reports, MEMORY)
