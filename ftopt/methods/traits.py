"""What a method says of itself beside its equations: how results overlap with training, and how they are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from ftopt.methods.values import ReplicaView, Round

Scalars = TypeVar("Scalars", bound=Callable[..., tuple[float, ...]])


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
        sharded: `outer_step` may give other bits on other machines: each element is computed by one member, and
            gathered. It must then treat every element alike and independently of the others; scalars of the outer state
            are rank 0's.
    """

    elementwise: bool = False
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
