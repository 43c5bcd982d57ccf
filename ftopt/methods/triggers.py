"""Triggers: pure predicates on a replica's `Progress` that say when a contribution is due.

A trigger answers `Due.NO`, `Due.YES`, or `Due.NOW`, which calls in the other replicas at once, since they cannot know
that it is time. It declares which numbers it needs (`Trigger.uses`) and at which steps (`Trigger.needs`): each norm is
a sweep over the parameters, and numbers that no trigger needs are not computed. Symbols besides those of ``method.py``:

===========  =======================================================================================
``u``        ``p - a``: a replica's movement since the anchor that it started from
``xi``       a unit vector that all replicas share: the normalised difference of the last two anchors
``Var``      the divergence, ``mean_m |p_m - mean(p)|^2 = mean|u_m|^2 - |mean u_m|^2``
``Theta``    the tolerated divergence, ``threshold``
===========  =======================================================================================

This file has the triggers by steps and seconds, and a combination of triggers; ``adaptive.py`` has those by
measurements.
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
    """A trigger's answer. Only `NO` is false."""

    NO = 0
    YES = 1
    """It is time; at equal speed all replicas find so at the same step."""
    NOW = 2
    """It is time here; the other replicas cannot know it and are called in at once."""


class Measurement(Flag):
    """The numbers that a trigger may need."""

    NONE = 0
    SQUARE = auto()
    """``|u|^2``: a sweep over the parameters."""
    ALONG = auto()
    """``<xi, u>``: a sweep, and a flat tensor to keep ``xi``."""
    DISTANCE = auto()
    """``|p - mean(p)|^2`` at each outer step: two sweeps and a flat tensor."""
    DISPLACEMENT = auto()
    """``|mean(u)|^2`` at each outer step: two sweeps and a flat tensor."""
    LOSS = auto()
    """The mean loss of the steps that an outer step counts; needs ``optimizer.log(loss=)``."""
    GRADIENT = auto()
    """The gradient's norm at each proposal of a contribution: a sweep over the gradients."""
    PACE = auto()
    """The members' inner steps per second."""
    RATE = auto()
    """The rate of each inner step; not measured, only added up."""


AT_MEAN = Measurement.DISTANCE | Measurement.DISPLACEMENT
"""The measurements on the mean of an outer step."""
AT_ROUNDS = AT_MEAN | Measurement.LOSS | Measurement.GRADIENT | Measurement.PACE
"""The measurements that members exchange in an outer step; the others are made between two outer steps."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """``square``: ``|u|^2``. ``along``: ``<xi, u>``. None: not measured, or not known."""

    square: float | None = None
    along: float | None = None


@dataclass(frozen=True, slots=True)
class MeanMeasurements:
    """The means of all replicas' last `Measurements`, including this replica's; up to two heartbeats old.

    Args:
        count: the number of replicas.
        numbers: the means. ``along`` is None while a replica that has just joined does not know ``xi``.
    """

    count: int
    numbers: Measurements


@dataclass(frozen=True, slots=True)
class MemberStats:
    """The numbers that one member of an outer step sends the others for their triggers; None: unknown, or not needed.

    Args:
        weight: ``w``.
        loss: the mean of the losses of its contribution's inner steps.
        gradient_norm: the L2 norm of the gradient at the snapshot.
        distance: ``|p - mean(p)|^2``, measured on what is sent.
        displacement: ``|mean(u)|^2``, also measured on what is sent; members' values differ at most by rounding.
        pace: inner steps per second over these steps, without breaks.
    """

    weight: float
    loss: float | None = None
    gradient_norm: float | None = None
    distance: float | None = None
    displacement: float | None = None
    pace: float | None = None


@dataclass(frozen=True, slots=True)
class RoundStats:
    """Statistics of the last outer step, equal on all members: part of the committed state, so that newcomers have
    them.

    Means are over the members that know the number, by their weights; None: no member knows it.

    Args:
        members: the number of members with positive weight; 0 before the first outer step.
        loss, gradient_norm, displacement: means of `MemberStats`.
        divergence: the mean of ``distance``: ``Var``, exactly.
        first_loss: ``F_0``, the loss of the first outer step with a known loss.
        pace: the sum of the members' inner steps per second; a member with an unknown pace counts as the mean of the
            others.
    """

    members: float = 0.0
    loss: float | None = None
    gradient_norm: float | None = None
    displacement: float | None = None
    divergence: float | None = None
    first_loss: float | None = None
    pace: float | None = None

    def after(self, seen: Sequence[MemberStats]) -> RoundStats:
        """The statistics after an outer step of these members. The same bits on every machine."""
        means = {name: _mean(seen, name) for name in ("loss", "gradient_norm", "displacement")}
        paces = [x.pace for x in seen if x.pace is not None]
        return RoundStats(
            **means,
            members=float(len(seen)),
            divergence=_mean(seen, "distance"),
            first_loss=means["loss"] if self.first_loss is None else self.first_loss,
            pace=math.fsum(paces) / len(paces) * len(seen) if paces else None,
        )


def _mean(seen: Sequence[MemberStats], name: str) -> float | None:
    """The weighted mean over the members that know it. `math.fsum`, unlike `sum`, rounds equally in every Python."""
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
        seconds: time since the same event as ``steps``.
        own: this replica's numbers, those that were needed at this step.
        means: all replicas' means; None: none were received since the last outer step.
        agreed: the statistics of the last outer step.
        pace: inner steps per second of this replica over its last contribution, or since it started if it has made
            none. None: not known.
        rate: the inner optimizer's largest rate, the mean over the pending steps. None: there are none, or the trigger
            does not use it.
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
    rate: float | None = None


@dataclass(frozen=True)
class Trigger(Settings, ABC):
    """A predicate on `Progress`. Subclasses are frozen dataclasses: their fields are their settings and recipe."""

    @abstractmethod
    def due(self, progress: Progress) -> Due:
        """Whether it is time. An unknown number never makes it due."""

    def needs(self, progress: Progress) -> Measurement:
        """The numbers that `due` needs at this step; ``progress`` has none yet. Here: none."""
        return Measurement.NONE

    @property
    def uses(self) -> Measurement:
        """All numbers that it may need. Here: none."""
        return Measurement.NONE

    @property
    def shares(self) -> bool:
        """Whether its measurements go to the other replicas, so that `Progress.means` has them. Here: no."""
        return False

    @property
    def longest(self) -> int | None:
        """The number of steps after which it is due at the latest; None: unknown."""
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

    Each replica uses its own clock and proposes within a step of the others: slow replicas contribute fewer steps, and
    the others do not wait for them.

    Args:
        seconds: > 0. May differ between replicas.
    """

    seconds: float = field(metadata=LOCAL)

    def __post_init__(self) -> None:
        check_number("trigger.seconds", self.seconds, "(0, inf)")

    def due(self, progress: Progress) -> Due:
        return Due.YES if progress.seconds >= self.seconds else Due.NO


@dataclass(frozen=True)
class AnyOf(Trigger):
    """Due when any of the triggers is due; `Due.NOW` when any of them is. It measures what each of them needs.

    Args:
        triggers: at least one.
    """

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

    def due(self, progress: Progress) -> Due:
        return max(part.due(progress) for part in self.triggers)

    def needs(self, progress: Progress) -> Measurement:
        return reduce(or_, (part.needs(progress) for part in self.triggers))

    @property
    def uses(self) -> Measurement:
        return reduce(or_, (part.uses for part in self.triggers))

    @property
    def shares(self) -> bool:
        return any(part.shares for part in self.triggers)

    @property
    def longest(self) -> int | None:
        return min((part.longest for part in self.triggers if part.longest is not None), default=None)
