"""``sync_every="balanced"``: a round's inner steps are shared out by speed, and everyone arrives at the same time.

Equations, with the letters of ``method.py``; ``S`` the inner steps of a round over all replicas, ``r_m`` the inner
steps a second of replica ``m``, measured over the steps of its last contribution (without outer steps, evaluation and
other breaks)::

    T   = S / sum_m r_m                 the seconds of a round, for everyone the same
    H_m = round(T * r_m)                from 1 to S

The members of an outer step tell each other their ``r_m`` in it. The sum is part of the committed state, so that every
replica goes by the same ``T``, also one that has just joined. When replicas come or go, the next outer step knows, and
the round behind it has ``S`` steps again: the global batch stays the same. It is off by rounding, half a step a replica
at most, and in the rounds in which somebody dies, joins, or is called in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ftopt.methods.method import LOCAL, Method
from ftopt.methods.triggers import Measurement, Progress

BALANCED = "balanced"
FIRST_ROUND = 10
"""The first round, in which the speeds are measured, has ``S / FIRST_ROUND`` steps on each replica: nobody knows how
many there are."""


@dataclass(frozen=True, kw_only=True)
class BySpeed(Method):
    """What `LocalSGD` and `DiLoCo` have beside the settings of every method.

    Args:
        sync_every: ``H``, or ``balanced``: of all replicas together ``round_steps`` a round, shared out by speed. A
            ``trigger`` may still bring a replica to a round before.
        round_steps: ``S``, with ``balanced`` alone. None (default): the method's own default of ``sync_every`` for each
            replica that took part in the last outer step; `LocalSGD` has none.
    """

    usual_steps: ClassVar[int | None] = None
    """The default of ``sync_every``, if there is one."""

    sync_every: int | str = field(metadata=LOCAL)
    round_steps: int | None = None

    def _check_period(self) -> None:
        steps = self.round_steps
        if isinstance(self.sync_every, str) and self.sync_every != BALANCED:
            raise ValueError(
                f"sync_every={self.sync_every!r}; must be balanced, or a whole number of inner steps, at least 1; use "
                "balanced to share the steps of a round out by speed"
            )
        if self.sync_every != BALANCED:
            super()._check_period()
            if steps is not None:
                raise ValueError(
                    f"round_steps={steps!r} with sync_every={self.sync_every!r}; it is shared out by speed with "
                    "sync_every=balanced; leave it out, or use that"
                )
        elif steps is None and self.usual_steps is None:
            raise ValueError(
                "sync_every=balanced needs round_steps, the inner steps of a round over all replicas; use e.g. "
                "round_steps=200 for 50 on each of 4"
            )
        elif steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"round_steps={steps!r}; must be a whole number of inner steps, at least 1")

    @property
    def period(self) -> int | None:
        """``sync_every``; None when it is shared out by speed."""
        return None if self.sync_every == BALANCED else super().period

    @property
    def is_plain(self) -> bool:
        """As of any method, unless it goes by speed."""
        return self._is_plain(BySpeed.steps_until_due)

    def steps_until_due(self, progress: Progress) -> int:
        """``H_m``."""
        if self.sync_every != BALANCED:
            return super().steps_until_due(progress)
        members, usual = progress.agreed.members, self.usual_steps or 1
        if not members:
            return usual if self.round_steps is None else -(-self.round_steps // FIRST_ROUND)
        together = self.round_steps or usual * members
        pace, all_paces = progress.pace, progress.agreed.pace
        share = pace / all_paces if pace is not None and all_paces is not None else 1 / members
        return max(1, round(together * min(share, 1.0)))

    @property
    def uses(self) -> Measurement:
        """The members' speeds, and what the trigger wants."""
        return super().uses | (Measurement.PACE if self.sync_every == BALANCED else Measurement.NONE)

    def settings(self) -> dict[str, str]:
        """All or none go by speed."""
        return super().settings() | ({"sync_every": BALANCED} if self.sync_every == BALANCED else {})
