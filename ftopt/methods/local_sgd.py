"""Local SGD: replicas train on their own and average their parameters every ``sync_every`` inner steps.

Equation, with the symbols of ``method.py``:

    A <- sum_m (w_m / W) * (p_m + (A - a))          a = cast(A)

The parameters themselves are sent, not differences: ``A - (A - p)`` differs from ``p`` in 2-15 % of all elements.
``A - a`` is exactly 0 for fp32 parameters. For bf16 and fp16 it is the anchor's precision beyond the parameters' last
bit, and stays with the anchor. The mean of equal parameters is that parameter, bit for bit, whatever the weights:
untrained parameters do not move. Through a codec that rounds, the differences ``a - p`` are sent: they are small, so
rounding loses less, and they are 0 for untrained parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ftopt.common.later import torch
from ftopt.methods.method import Method, Paced
from ftopt.methods.triggers import LOCAL
from ftopt.methods.values import AnchorAndState, Execution, OuterState, ReplicaView, Round

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Averaging(Method):
    """The equations of `LocalSGD`."""

    execution = Execution(elementwise=True, values=True)

    def payload(self, view: ReplicaView, out: Tensor) -> Tensor:
        """``p + (A - a)``; exactly ``p`` for fp32 parameters, and for a replica that is alone; ``a - p`` if lossy."""
        if view.lossy:
            return torch.sub(view.start, view.params, out=out)
        if view.alone or view.start is view.anchor:
            return out.copy_(view.params)
        return torch.sub(view.anchor, view.start, out=out).add_(view.params)

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round) -> AnchorAndState:
        return self.average(anchor, mean, round), {}

    def average(self, anchor: Tensor, mean: Tensor, round: Round) -> Tensor:
        """The mean of parameters; ``A - mean`` if differences were sent."""
        return torch.sub(anchor, mean, out=mean) if round.lossy else mean


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Paced, Averaging):
    """Average the parameters every ``sync_every`` inner steps, weighted by the steps that each replica took.

    Each replica keeps its inner optimizer's state. A replica that is the only contributor keeps its parameters bit for
    bit: alone, it trains as with the bare inner optimizer, also with bf16 parameters.

    Args:
        sync_every: inner steps between two averages, >= 1. Default 50, the upper end of the usual 10 to 50.
        others: see `Paced` and `Method`.

    Source: arXiv 1805.09767. Ours weights by steps, where the paper's workers all take the same number.
    """

    name: ClassVar[str] = "local_sgd"

    sync_every: int = field(default=50, metadata=LOCAL)
