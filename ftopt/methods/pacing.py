"""Pacing by speed: the inner steps of a round are shared out, so that all replicas arrive at the same time.

Equations, with the letters of ``method.py``; ``S`` the inner steps of a round over all replicas, ``r_m`` the inner
steps a second of replica ``m``, measured over the steps of its last contribution (without outer steps, evaluation and
other breaks)::

    T   = S / sum_m r_m                 the seconds of a round, the same for every replica
    H_m = round(T * r_m)                from 1 to S

The members of an outer step exchange their ``r_m`` in it. The sum is part of the committed state, so that every replica
uses the same ``T``, also one that has just joined. When replicas come or go, the next outer step has them in its sum,
and the round behind it has ``S`` steps again: the global batch stays the same. It is off by rounding, half a step a
replica at most, and in the rounds in which a replica dies, joins, or is called in.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.errors import UserError
from ftopt.methods.checks import is_whole
from ftopt.methods.triggers import Progress

FIRST_ROUND = 10
"""The first round, in which the speeds are measured, has ``S / FIRST_ROUND`` steps on each replica: their number is not
known yet."""


@dataclass(frozen=True, kw_only=True)
class BySpeed:
    """Shares the inner steps of a round out by speed, for a method's ``pacing``.

    A ``trigger`` may still bring a replica to a round before its share is done.

    Args:
        round_steps: ``S``. None (default): the method's ``sync_every`` times the replicas that took part in the last
            outer step.

    Raises:
        UserError: ``round_steps`` is not a positive whole number.
    """

    round_steps: int | None = None

    def __post_init__(self) -> None:
        steps = self.round_steps
        if steps is not None and not is_whole(steps, 1):
            raise UserError(
                f"pacing.round_steps={steps!r}; must be a whole number of inner steps, at least 1; use e.g. 200 for 50 "
                "on each of 4 replicas"
            )

    def steps(self, progress: Progress, usual: int | None) -> int:
        """``H_m``; ``usual`` is the method's ``sync_every``."""
        members, each = progress.agreed.members, usual or 1
        if not members:
            return each if self.round_steps is None else -(-self.round_steps // FIRST_ROUND)
        together = self.round_steps or each * members
        pace, all_paces = progress.pace, progress.agreed.pace
        share = pace / all_paces if pace is not None and all_paces is not None else 1 / members
        return max(1, round(together * min(share, 1.0)))
