"""When a contribution is due: a method's period, pacing and trigger as one predicate.

Pacing by speed divides the inner steps of a round so that all replicas finish at the same time. Equations, with the
symbols of ``method.py``; ``S`` is the number of inner steps of a round over all replicas, ``r_m`` the inner steps per
second of replica ``m``, measured over the steps of its last contribution (without outer steps, evaluation and other
breaks):

    T   = S / sum_m r_m                 the seconds of a round, the same for every replica
    H_m = round(T * r_m)                from 1 to S

The members of an outer step exchange their ``r_m`` in it. The sum is part of the committed state, so that every replica
uses the same ``T``, also a new one. When replicas come or go, the sum of the next outer step reflects it, and the round
after that has ``S`` steps again: the global batch stays the same. It is off by rounding, at most half a step per
replica, and in rounds in which a replica dies, joins, or is called in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

from ftopt.errors import FtoptError, Settings, UserError, check_whole
from ftopt.methods.triggers import Due, Measurement, Progress, Trigger

T = TypeVar("T")

FIRST_ROUND = 10
"""The first round, which measures the speeds, has ``S / FIRST_ROUND`` steps on each replica: the number of replicas is
not known yet."""


@dataclass(frozen=True, kw_only=True)
class BySpeed(Settings):
    """Divides the inner steps of a round by speed, for a method's ``pacing``.

    A ``trigger`` may still make a replica propose before its share is done.

    Args:
        round_steps: ``S``, in place of the method's ``sync_every``. None (default): ``sync_every`` times the replicas
            that took part in the last outer step.

    Raises:
        UserError: ``round_steps`` is not a positive whole number.
    """

    round_steps: int | None = None

    def __post_init__(self) -> None:
        if self.round_steps is not None:
            hint = "use e.g. 200 for 50 on each of 4 replicas"
            check_whole("pacing.round_steps", self.round_steps, 1, of="inner steps", hint=hint)

    def steps(self, progress: Progress, usual: int) -> int:
        """``H_m``; ``usual`` is the method's ``sync_every``."""
        members = progress.agreed.members
        if not members:
            return usual if self.round_steps is None else -(-self.round_steps // FIRST_ROUND)
        together = self.round_steps or usual * members
        pace, all_paces = progress.pace, progress.agreed.pace
        share = pace / all_paces if pace is not None and all_paces is not None else 1 / members
        return max(1, round(together * min(share, 1.0)))


@final
@dataclass(frozen=True, kw_only=True)
class Timing:
    """When the contributions of a method's fragments are due.

    Args:
        sync_every: ``H``.
        trigger: see `Method`.
        average_until_step: see `Method`.
        pacing: how the inner steps of a round are divided; None: every replica takes ``sync_every``.
        staggered: fragment ``f`` of ``P`` is first due after ``ceil(f H / P)`` steps (f = 0: H), instead of all
            fragments at once.
        aligned: without a trigger, due at multiples of H of the job's inner step, so that a joiner is due with the
            others.
    """

    sync_every: int
    trigger: Trigger | None = None
    average_until_step: int = 0
    pacing: BySpeed | None = None
    staggered: bool = False
    aligned: bool = False

    @property
    def period(self) -> int | None:
        """``H``; None if it changes between rounds."""
        return None if self.pacing is not None else self.sync_every

    @property
    def fixed_period(self) -> int | None:
        """``H`` if `due` depends on nothing else and need not be called at each step; else None."""
        return None if self.trigger is not None or self.average_until_step else self.period

    def steps_until_due(self, progress: Progress) -> int:
        """The maximum number of inner steps from one proposal to the next."""
        if self.pacing is not None:
            return self.pacing.steps(progress, self.sync_every)
        return self.sync_every

    def due(self, progress: Progress) -> Due:
        """Whether it is time for this replica to propose a contribution; at the latest after `steps_until_due`."""
        if self._is_overdue(progress):
            return Due.YES
        if self.trigger is None:
            return Due.NO
        due = _ask(self.trigger.due, progress)
        if type(due) is not Due and not isinstance(due, bool):
            raise UserError(
                f"{type(self.trigger).__name__}.due() gives {due!r:.60}; must be ftopt.triggers.Due.NO, YES or NOW"
            )
        return Due(due)

    def needs(self, progress: Progress) -> Measurement:
        """Which numbers `due` needs at this step."""
        if self.trigger is None or self._is_overdue(progress):
            return Measurement.NONE
        return _ask(self.trigger.needs, progress)

    def _is_overdue(self, progress: Progress) -> bool:
        averages = 0 < progress.inner_step <= self.average_until_step
        return progress.steps >= (1 if averages else self.steps_until_due(progress))

    @property
    def uses(self) -> Measurement:
        """All numbers that the trigger and the pacing ever need."""
        paced = Measurement.NONE if self.pacing is None else Measurement.PACE
        return paced if self.trigger is None else paced | self.trigger.uses

    @property
    def shares(self) -> bool:
        """Whether the trigger needs the other replicas' numbers, too."""
        return self.trigger is not None and self.trigger.shares

    def phase(self, fragment: int, fragments: int, inner_step: int) -> int:
        """The number of its ``sync_every`` steps that a fragment starting at ``inner_step`` counts as done."""
        # Fragment 0's last outer step is where the job's inner step is counted from.
        by_job = fragment > 0 if self.staggered else self.aligned and self.trigger is None
        if not by_job:
            return 0
        offset = -(-fragment * self.sync_every // fragments) if self.staggered else 0
        return (inner_step - self.average_until_step - offset) % self.sync_every


def _ask(own: Callable[[Progress], T], progress: Progress) -> T:
    """The result of a trigger's method. UserError: it has raised."""
    try:
        return own(progress)
    except FtoptError:
        raise
    except Exception as error:
        name = getattr(own, "__qualname__", repr(own))
        raise UserError(f"trigger: {name}() failed: {type(error).__name__}: {error}; mend it") from error
