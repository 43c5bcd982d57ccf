"""Local SGD: replicas train on their own and average their parameters every ``sync_every`` inner steps.

Equation, with the letters of ``method.py``::

    A <- sum_m (w_m / W) * (p_m + (A - a))          a = cast(A)

The parameters themselves are sent, not differences: ``A - (A - p)`` is another number than ``p`` in 2-15 % of
all elements. ``A - a`` is exactly 0 for fp32 parameters. For bf16 and fp16 it is what the anchor knows below
the parameters' last bit, and stays with the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ftopt.methods.method import OuterState
from ftopt.methods.triggers import Progress, check_sync_every, every


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Average the parameters every ``sync_every`` inner steps, weighted by the steps that each replica took.

    The inner optimizers' states stay with their replicas. A replica that is the only contributor keeps its
    parameters bit for bit: alone, training is that of the bare inner optimizer, also with bf16 parameters.

    Args:
        sync_every: inner steps between two averages, >= 1. No default: 10 to 50 is usual.

    Raises:
        ValueError: ``sync_every`` is out of range; the message says what is allowed.

    Source: arXiv 1805.09767. Ours weights by steps, where the paper's workers all take the same number.
    """

    sync_every: int

    def __post_init__(self) -> None:
        check_sync_every(self.sync_every)

    @property
    def name(self) -> str:
        """``local_sgd``."""
        return "local_sgd"

    def fragments(self) -> int:
        """One."""
        return 1

    def due(self, progress: Progress) -> bool:
        """``sync_every`` inner steps after the last proposal or take-over."""
        return every(self.sync_every, progress)

    def weight(self, *, steps: int, tokens: int) -> float:
        """The steps."""
        return float(steps)

    def before_inner_step(self, progress: Progress) -> None:
        """Nothing: parameters are exchanged, not gradients."""

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Averaging has no outer state."""
        return {}

    def payload(self, anchor: Tensor, start: Tensor, params: Tensor, *, alone: bool, out: Tensor) -> Tensor:
        """``p + (A - a)``; exactly ``p`` for fp32 parameters, and for a replica that is ``alone``."""
        if alone or start is anchor:
            return out.copy_(params)
        return torch.sub(anchor, start, out=out).add_(params)

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean is the anchor."""
        return mean, {}

    def settings(self) -> dict[str, str]:
        """``sync_every``."""
        return {"sync_every": str(self.sync_every)}
