"""What a method computes from (one replica's side of a round, and what all members know alike), and what it says of
itself besides its equations: how results overlap with training, and how they are computed."""

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
    """What a contribution holds, for its weight.

    Args:
        steps: inner steps.
        tokens: tokens, as counted by ``optimizer.count``; 0 without.
        staleness: outer steps committed without this replica since the oldest step in here.
    """

    steps: int
    tokens: int
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica's own side of a round: what it sends is computed from this.

    Args:
        anchor: ``A``, flat fp32.
        start: ``a``, flat fp32; the same tensor as ``anchor`` when all parameters are fp32.
        params: ``p``, flat fp32.
        layout: where each parameter lies in the flat tensors.
        steps: inner steps in it.
        lr: the inner optimizer's largest rate, the mean over these steps; without `Method.scalars` of its own, a method
            gets that of the last step.
        alone: no other member has a positive weight: the mean is this replica's payload.
        lossy: the payload goes through a codec that rounds: send differences, which it can represent.
        averages: the round only averages, it is before ``average_until_step``.
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
    """What all members of a quorum know alike about the outer step that they compute.

    Args:
        fragment: the fragment.
        version: the version that it makes, 1 for the first: the outer optimizer's step.
        inner_step: the fragment's committed inner step before this outer step (fragment 0's is the job's).
        layout: where each parameter lies in the flat tensors.
        shares: ``w / W`` of each member of positive weight, in rank order. Members exchange their weights only if the
            method has `Method.scalars` or averages values (`Execution.values`, averaged buffers or inner state), or if
            the codec rounds. Otherwise it is ``(1.0,)``, however many members there are: a method of your own that
            needs the shares must have scalars.
        scalars: what `Method.scalars` gave on each of them.
        lossy: see `ReplicaView`.
        seen: the statistics they exchanged for the trigger, in rank order; empty when it needs none.
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
        """The weighted mean of the ``index``-th scalar, the same in all Pythons; of equal ones it is that scalar."""
        first = self.scalars[0][index]
        apart = [share * (row[index] - first) for share, row in zip(self.shares, self.scalars, strict=True)]
        return first + math.fsum(apart)  # Not sum(): Pythons differ in how it adds up.


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How an outer step overlaps with training.

    Args:
        delay: ``tau``, inner steps from the snapshot to the application of the result; 0: training waits for the outer
            step.
        mix: alpha of ``params <- alpha * params + (1 - alpha) * A`` when the result is applied; None: rebase, no step
            is lost.
        wait_for_result_s: seconds that training waits, ``delay`` steps after the snapshot, for a result that is still
            undecided.
        adaptive_grace: gamma of the adaptive grace, >= 0: the share of the time, hidden behind ``delay`` steps and not
            needed by the round itself, for which the others are waited for. 0: they are waited for as long as the
            job's settings say.
    """

    delay: int = 0
    mix: float | None = None
    wait_for_result_s: float = 0.0
    adaptive_grace: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How `Method.payload` and `Method.outer_step` may be computed.

    Args:
        elementwise: both treat every element alike and independently of the others: they are then called piece by
            piece, and the scalars of the outer state that the pieces return must be equal.
        values: the payload holds values, not displacements, unless it goes through a codec that rounds. Their mean is
            taken so that the mean of equal values is that value, bit for bit.
        sharded: `outer_step` may give other bits on other machines: each element is computed by one member, and
            gathered. It must then treat every element alike and independently of the others; scalars of the outer state
            are rank 0's.
    """

    elementwise: bool = False
    values: bool = False
    sharded: bool = False


class Aggregation(Protocol):
    """How payloads become what `Method.outer_step` gets, where that is not their weighted mean."""

    def units(self, view: ReplicaView) -> str:
        """What the payload's values mean, in a word: error feedback goes from one payload to the next of these. The
        same on all members of a round."""

    def aggregate(self, mean: Tensor, round: Round) -> Tensor:
        """The result, from the weighted mean of the payloads. May overwrite ``mean``."""


def without_tensors(scalars: Scalars) -> Scalars:
    """Marks a `Method.scalars` that reads no tensors of the view: they need not exist as a whole then."""
    scalars.reads_tensors = False  # type: ignore[attr-defined]
    return scalars
