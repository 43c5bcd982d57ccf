"""Adaptive grace: a round waits for slow members as long as training goes on meanwhile.

    grace = clamp(gamma * (tau * step - quorum - sync), 0, cap)

``tau * step``: how long a proposer trains on without the result, by the moving average of its step times; the shortest
of several proposers'. ``quorum``, ``sync``: moving averages of the times from the first proposal until ``min_replicas``
have proposed, and from the attempt's start until the last member has prepared. ``cap``: ``grace_s``.

Source: Decoupled DiLoCo (arXiv 2604.21428).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ftopt.sync.protocol.messages import Contribution

SMOOTHING = 0.9


@dataclass(slots=True)
class Pace:
    """How fast the rounds of one fragment have been, in seconds. ``round_s``: from the last version but one until the
    first replica that was not slow proposed; 0: not known."""

    quorum_s: float = 0.0
    sync_s: float = 0.0
    rounds: int = 0
    round_s: float = 0.0

    def learn(self, quorum_s: float, sync_s: float) -> None:
        """Learns from a round that was committed without a retry."""
        keep = SMOOTHING if self.rounds else 0.0
        self.quorum_s = keep * self.quorum_s + (1 - keep) * quorum_s
        self.sync_s = keep * self.sync_s + (1 - keep) * sync_s
        self.rounds += 1

    def grace_s(self, proposed: Iterable[Contribution], cap_s: float) -> float:
        """The grace, from when enough have proposed. It is ``cap_s`` for a proposer without overlap or adaptation."""
        known_s = self.quorum_s + self.sync_s
        wishes = [c.grace * (c.overlap_s - known_s) for c in proposed if c.grace and c.overlap_s]
        return min(max(0.0, min(wishes, default=cap_s)), cap_s)
