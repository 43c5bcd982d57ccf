"""Triggers: pure predicates on a replica's `Progress` that say when a contribution is due.

A trigger answers `Due.NO`, `Due.YES`, or `Due.NOW`: the others are called in at once, since they cannot know that it
is time. It says which numbers it needs (`Trigger.uses`) and at which steps (`Trigger.needs`): each norm is a sweep over
the parameters, and a number that no trigger needs is not computed. Legend, beside that of ``method.py``:

===========  =======================================================================================
``u``        ``p - a``: how far a replica has moved since the anchor that it started from
``xi``       a unit vector that all replicas share: the normalised difference of the last two anchors
``Var``      the divergence, ``mean_m |p_m - mean(p)|^2 = mean|u_m|^2 - |mean u_m|^2``
``Theta``    the divergence that is borne, ``threshold``
===========  =======================================================================================

Here are the triggers by steps and seconds, and how triggers are joined; those by what happens between two outer steps
are in ``divergence.py``, those that set the next period at each outer step in ``adaptive.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Flag, IntEnum, auto
from functools import reduce
from operator import or_
from typing import Any

from ftopt.errors import Settings, UserError, check_number, check_whole

LOCAL: dict[str, Any] = {"local": True}
"""Metadata of a setting that may differ from replica to replica."""


class Due(IntEnum):
    """What a trigger says. Only `NO` is false."""

    NO = 0
    YES = 1
    """It is time; at equal speed it is so for all replicas at the same step."""
    NOW = 2
    """It is time here, and the others cannot know it: they are called in at once."""


class Measurement(Flag):
    """What a trigger may ask for."""

    NONE = 0
    SQUARE = auto()
    """``|u|^2``: a sweep over the parameters."""
    ALONG = auto()
    """``<xi, u>``: a sweep, and a flat tensor is kept for ``xi``."""
    DISTANCE = auto()
    """``|p - mean(p)|^2`` at an outer step: two sweeps and a flat tensor, at each."""
    DISPLACEMENT = auto()
    """``|mean(u)|^2`` at an outer step: two sweeps and a flat tensor, at each."""
    LOSS = auto()
    """The mean loss of the steps that an outer step counts; needs ``optimizer.count(loss=)``."""
    GRADIENT = auto()
    """The gradient's norm when a contribution is proposed: a sweep over the gradients, at each."""
    PACE = auto()
    """The members' inner steps a second."""


AT_MEAN = Measurement.DISTANCE | Measurement.DISPLACEMENT
"""What is measured on the mean of an outer step."""
AT_ROUNDS = AT_MEAN | Measurement.LOSS | Measurement.GRADIENT | Measurement.PACE
"""What the members of an outer step exchange in it; all else is measured between two outer steps."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """``square``: ``|u|^2``. ``along``: ``<xi, u>``. None: not measured, or not known."""

    square: float | None = None
    along: float | None = None


@dataclass(frozen=True, slots=True)
class MeanMeasurements:
    """The replicas' means of their last `Measurements`, this one's among them; up to two heartbeats old.

    Args:
        count: replicas in it.
        numbers: the means. ``along`` is None while a replica that has just joined does not know ``xi``.
    """

    count: int
    numbers: Measurements


@dataclass(frozen=True, slots=True)
class MemberStats:
    """What one member of an outer step sends the others for their triggers; None: unknown, or not needed.

    Args:
        weight: ``w``.
        steps: inner steps of its contribution.
        lr: the inner optimizer's largest rate at its snapshot.
        loss: the mean of the losses of these steps.
        gradient_norm: the L2 norm of the gradient at the snapshot.
        distance: ``|p - mean(p)|^2``, measured on what is sent.
        displacement: ``|mean(u)|^2``, likewise; the members' numbers differ by rounding at most.
        pace: inner steps a second over these steps, without breaks.
    """

    weight: float
    steps: float
    lr: float
    loss: float | None = None
    gradient_norm: float | None = None
    distance: float | None = None
    displacement: float | None = None
    pace: float | None = None


@dataclass(frozen=True, slots=True)
class RoundStats:
    """What all members of the last outer step know alike of it: part of the committed state, so that newcomers do, too.

    Means are weighted by the members' weights, over those that know the number; None: no member does.

    Args:
        members: those of positive weight; 0 before the first outer step.
        steps, lr, loss, gradient_norm, displacement: means of `MemberStats`.
        divergence: the mean of ``distance``: ``Var``, exactly.
        first_loss: ``F_0``, the loss of the first outer step that knew one.
        first_lr: the rate of that one.
        pace: the members' inner steps a second, added up; a member that does not know its own counts as the others'
            mean.
    """

    members: float = 0.0
    steps: float | None = None
    lr: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    displacement: float | None = None
    divergence: float | None = None
    first_loss: float | None = None
    first_lr: float | None = None
    pace: float | None = None

    def after(self, seen: Sequence[MemberStats]) -> RoundStats:
        """What is known after an outer step of these members. The same bits on every machine."""
        means = {name: _mean(seen, name) for name in ("steps", "lr", "loss", "gradient_norm", "displacement")}
        first = self.first_loss is None and means["loss"] is not None
        paces = [x.pace for x in seen if x.pace is not None]
        return RoundStats(
            **means,
            members=float(len(seen)),
            divergence=_mean(seen, "distance"),
            first_loss=means["loss"] if first else self.first_loss,
            first_lr=means["lr"] if first else self.first_lr,
            pace=math.fsum(paces) / len(paces) * len(seen) if paces else None,
        )


def _mean(seen: Sequence[MemberStats], name: str) -> float | None:
    """The weighted mean over the members that know it. `math.fsum`, unlike `sum`, rounds alike in every Python."""
    told = [(x.weight, getattr(x, name)) for x in seen]
    known = [(weight, value) for weight, value in told if value is not None and math.isfinite(value)]
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight * value for weight, value in known) / total if total > 0 else None


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a replica stands with one fragment, at a boundary between two inner steps.

    Args:
        fragment: the fragment.
        steps: inner steps since the fragment's last proposal or applied result, whichever came later.
        pending_steps: inner steps that no committed state has counted yet.
        local_steps: inner steps executed in this incarnation.
        inner_step: the job's committed inner step plus the pending ones.
        seconds: since the same moment as ``steps``.
        own: this replica's numbers, as far as they were asked for at this step.
        means: all replicas' means; None: none were received since the last outer step.
        agreed: of the last outer step.
        pace: inner steps a second of this replica, over its last contribution; over all since it started, before it has
            made one. None: not known.
    """

    fragment: int
    steps: int
    pending_steps: int
    local_steps: int
    inner_step: int
    seconds: float = 0.0
    own: Measurements = Measurements()
    means: MeanMeasurements | None = None
    agreed: RoundStats = RoundStats()
    pace: float | None = None


@dataclass(frozen=True)
class Trigger(Settings, ABC):
    """A predicate on `Progress`. Subclasses are frozen dataclasses: their fields are their settings and recipe."""

    @abstractmethod
    def due(self, progress: Progress) -> Due:
        """Is it time? A number that is not known is never a reason."""

    def needs(self, progress: Progress) -> Measurement:
        """Which numbers `due` needs at this step; ``progress`` has none yet. Here: none."""
        return Measurement.NONE

    @property
    def uses(self) -> Measurement:
        """All numbers that it ever needs. Here: none."""
        return Measurement.NONE

    @property
    def shares(self) -> bool:
        """Whether what is measured goes to the other replicas, so that `Progress.means` has it. Here: no."""
        return False

    @property
    def longest(self) -> int | None:
        """After how many steps it is due at the latest; None: unknown."""
        return None


@dataclass(frozen=True)
class Every(Trigger):
    """Due from the ``steps``-th inner step after the last proposal or applied result on.

    Args:
        steps: inner steps, >= 1. May differ between replicas.
    """

    steps: int = field(metadata=LOCAL)

    def __post_init__(self) -> None:
        check_whole("trigger.steps", self.steps, 1, of="inner steps")

    def due(self, progress: Progress) -> Due:
        return Due.YES if progress.steps >= self.steps else Due.NO

    @property
    def longest(self) -> int:
        return self.steps


@dataclass(frozen=True)
class EverySeconds(Trigger):
    """Due at the first boundary that is ``seconds`` after the last proposal or applied result.

    Each replica uses its own clock and arrives within a step of the others: slow ones contribute fewer steps instead of
    being waited for.

    Args:
        seconds: > 0. May differ between replicas.
    """

    seconds: float = field(metadata=LOCAL)

    def __post_init__(self) -> None:
        check_number("trigger.seconds", self.seconds, "(0, inf)")

    def due(self, progress: Progress) -> Due:
        return Due.YES if progress.seconds >= self.seconds else Due.NO


@dataclass(frozen=True)
class EveryStaged(Trigger):
    """`Every` with a period that changes as the job goes on: ``[[0, 1], [100, 10], [1000, 50]]``.

    Post-local SGD (arXiv 1808.07217) is ``[[0, 1], [switch, H]]``.

    Args:
        stages: pairs of a job's inner step and the period from there on; the first begins at 0. A period that has begun
            goes on to its end.
    """

    stages: list[list[int]] = field(metadata=LOCAL)

    def __post_init__(self) -> None:
        try:
            begins, periods = zip(*self.stages, strict=True)
            whole = all(type(x) is int for x in begins + periods)
            good = whole and begins[0] == 0 and list(begins) == sorted(set(begins)) and min(periods) >= 1
        except (TypeError, ValueError):
            good = False
        if not good:
            raise UserError(
                f"trigger.stages={self.stages!r}; must be pairs of an inner step, 0 first and rising, and a period of "
                "at least 1; use e.g. [[0, 1], [100, 10], [1000, 50]]"
            )

    def due(self, progress: Progress) -> Due:
        began = max(0, progress.inner_step - progress.steps)
        period = [steps for begin, steps in self.stages if begin <= began][-1]
        return Due.YES if progress.steps >= period else Due.NO

    @property
    def longest(self) -> int:
        return max(steps for _, steps in self.stages)


@dataclass(frozen=True)
class _Joined(Trigger):
    """Several triggers as one: what each of them needs is measured."""

    triggers: Sequence[Trigger]

    def __post_init__(self) -> None:
        parts = tuple(self.triggers) if isinstance(self.triggers, Iterable) else (self.triggers,)
        object.__setattr__(self, "triggers", parts)
        wrong = [part for part in parts if not isinstance(part, Trigger)]
        if wrong or not parts:
            got = repr(wrong[0]) if wrong else "an empty list"
            raise UserError(
                f"trigger.triggers: got {got}; must be triggers, at least one; use e.g. [ftopt.triggers.Every(100)]"
            )

    def needs(self, progress: Progress) -> Measurement:
        return reduce(or_, (part.needs(progress) for part in self.triggers))

    @property
    def uses(self) -> Measurement:
        return reduce(or_, (part.uses for part in self.triggers))

    @property
    def shares(self) -> bool:
        return any(part.shares for part in self.triggers)


@dataclass(frozen=True)
class AnyOf(_Joined):
    """Due when one of them is. `Due.NOW` when one that is due is so now.

    Args:
        triggers: at least one.
    """

    def due(self, progress: Progress) -> Due:
        return max(part.due(progress) for part in self.triggers)

    @property
    def longest(self) -> int | None:
        return min((part.longest for part in self.triggers if part.longest is not None), default=None)


@dataclass(frozen=True)
class AllOf(_Joined):
    """Due when all of them are. `Due.NOW` when one of them is so now.

    Args:
        triggers: at least one.
    """

    def due(self, progress: Progress) -> Due:
        answers = [part.due(progress) for part in self.triggers]
        return max(answers) if all(answers) else Due.NO

    @property
    def longest(self) -> int | None:
        found = [part.longest for part in self.triggers]
        return None if None in found else max(steps for steps in found if steps is not None)
