"""A method's inputs, and its properties besides the equations.

The inputs are one replica's side of a round, and the data that all members share. The properties are how results
overlap with training, and how they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from ftopt.methods.fragments import Layout
from ftopt.methods.triggers import MemberStats

if TYPE_CHECKING:
    from torch import Tensor

Scalars = TypeVar("Scalars", bound=Callable[..., tuple[float, ...]])

OuterState: TypeAlias = "Mapping[str, Tensor]"
"""Outer optimizer state of one fragment: name -> flat fp32 tensor of its length, or a scalar (no dimensions)."""

AnchorAndState: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"


@dataclass(frozen=True, slots=True)
class ContributionStats:
    """The contents of a contribution, which determine its weight.

    Args:
        steps: inner steps.
        tokens: tokens counted by ``optimizer.log``; 0 if none were.
    """

    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica's own side of a round, from which its payload is computed.

    Args:
        anchor: ``A``, flat fp32.
        start: ``a``, flat fp32; the same tensor as ``anchor`` when all parameters are fp32.
        params: ``p``, flat fp32.
        layout: where each parameter lies in the flat tensors.
        steps: inner steps in the contribution.
        lr: the inner optimizer's largest rate, averaged over these steps; a method without its own `Method.scalars`
            gets the last step's.
        alone: no other member has a positive weight: the mean is this replica's payload.
        lossy: the payload goes through a codec that rounds: send differences, which it can represent.
        averages: the round only averages, since it is before ``average_until_step``.
    """

    anchor: Tensor
    start: Tensor
    params: Tensor
    layout: Layout
    steps: int = 1
    lr: float = 0.0
    alone: bool = False
    lossy: bool = False
    averages: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """The data about an outer step that all members of its quorum share.

    Args:
        fragment: the fragment.
        version: the version that it makes, 1 for the first: the outer optimizer's step.
        inner_step: the fragment's committed inner step before this outer step (fragment 0's is the job's).
        layout: where each parameter lies in the flat tensors.
        shares: ``w / W`` of each member of positive weight, in rank order. Members exchange their weights only if the
            method has `Method.scalars` or averages values (`Execution.values`, averaged buffers or inner state), or if
            the codec rounds. Otherwise it is ``(1.0,)``, however many members there are: a method of your own that
            needs the shares must have scalars.
        scalars: the result of `Method.scalars` on each of these members.
        lossy: see `ReplicaView`.
        seen: the statistics that members exchanged for the trigger, in rank order; empty if it needs none.
    """

    fragment: int
    version: int
    inner_step: int
    layout: Layout
    shares: tuple[float, ...] = (1.0,)
    scalars: tuple[tuple[float, ...], ...] = ((),)
    lossy: bool = False
    seen: tuple[MemberStats, ...] = ()

    def mean(self, index: int) -> float:
        """The weighted mean of the ``index``-th scalar, the same in all Pythons; equal scalars have exactly their value
        as mean."""
        first = self.scalars[0][index]
        apart = [share * (row[index] - first) for share, row in zip(self.shares, self.scalars, strict=True)]
        return first + math.fsum(apart)  # Not sum(), which rounds differently between Pythons.


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How an outer step overlaps with training.

    Args:
        delay: ``tau``, inner steps from the snapshot to the application of the result; 0: training waits for the outer
            step.
        mix: alpha of ``params <- alpha * params + (1 - alpha) * A`` when the result is applied; None: rebase, which
            loses no step.
        wait_for_result_s: seconds that training waits, ``delay`` steps after the snapshot, for a result that is still
            undecided.
        adaptive_grace: gamma of the adaptive grace, >= 0: of the time that ``delay`` steps hide and the round itself
            does not need, the share spent waiting for other replicas. 0: the wait is as long as the job's settings say.
    """

    delay: int = 0
    mix: float | None = None
    wait_for_result_s: float = 0.0
    adaptive_grace: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How `Method.payload` and `Method.outer_step` may be computed.

    Args:
        elementwise: both treat every element equally and independently of the others: they are then called piece by
            piece, and the scalars of the outer state that the pieces return must be equal.
        values: the payload holds values, not displacements, unless it goes through a codec that rounds. Their mean is
            taken so that the mean of equal values is that value, bit for bit.
        sharded: `outer_step` may give different bits on different machines: one member computes each element, and the
            results are gathered. It must then treat every element equally and independently of the others; scalars of
            the outer state are rank 0's.
    """

    elementwise: bool = False
    values: bool = False
    sharded: bool = False


class Aggregation(Protocol):
    """Computes the input of `Method.outer_step` from the payloads where it is not their weighted mean."""

    def units(self, view: ReplicaView) -> str:
        """The unit of the payload's values, one word: error feedback carries over only between payloads of the same
        unit. The same on all members of a round."""

    def aggregate(self, mean: Tensor, round: Round) -> Tensor:
        """The input of `Method.outer_step`, from the weighted mean of the payloads. May overwrite ``mean``."""


def without_tensors(scalars: Scalars) -> Scalars:
    """Marks a `Method.scalars` that reads no tensors of the view, which then need not exist as a whole."""
    scalars.reads_tensors = False  # type: ignore[attr-defined]
    return scalars
