"""DiLoCo: many local steps of an inner optimizer, then one step of an outer optimizer on the mean
displacement.

Equations, with the letters of ``method.py``::

    Delta_m = a - p_m                               a = cast(A)
    Delta   = sum_m (w_m / W) * Delta_m
    A      <- OuterOpt(A, Delta)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ftopt.methods.method import OuterState
from ftopt.methods.outer_optimizers import SGD, OuterOptimizerRule
from ftopt.methods.triggers import Progress, check_sync_every, every


def _nesterov() -> OuterOptimizerRule:
    return SGD(lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Distributed Low-Communication training: an outer optimizer on the mean of the replicas' displacements.

    The inner optimizers' states stay with their replicas (exchanging them gained nothing in the paper).

    Args:
        sync_every: inner steps between two outer steps (the paper's H), >= 1. Default 500, the paper's. 30 to
            100 costs less in quality.
        outer: the outer optimizer. Default ``SGD(lr=0.7, momentum=0.9, nesterov=True)``, the paper's. With
            only a dozen outer steps in the whole run momentum 0.5 does better than 0.9.

    Raises:
        ValueError: a setting is out of range; the message says what is allowed.

    Source: arXiv 2311.08105, algorithm 1. Ours weights by the inner steps that a replica brings (the paper's
        replicas
    all bring H; for data of unlike sizes it weights by those), and casts the anchor to the parameters' dtype
    first.
    """

    sync_every: int = 500
    outer: OuterOptimizerRule = field(default_factory=_nesterov)

    def __post_init__(self) -> None:
        check_sync_every(self.sync_every)
        if isinstance(self.outer, torch.optim.Optimizer) or not callable(getattr(self.outer, "step", None)):
            raise ValueError(
                f"outer={type(self.outer).__name__}; must be an outer optimizer of ftopt; "
                "use ftopt.SGD(lr=0.7, momentum=0.9, nesterov=True)"
            )

    @property
    def name(self) -> str:
        """``diloco``."""
        return "diloco"

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
        """Nothing: displacements are exchanged, not gradients."""

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """The outer optimizer's."""
        return self.outer.init(anchor)

    def payload(self, anchor: Tensor, start: Tensor, params: Tensor, *, alone: bool, out: Tensor) -> Tensor:
        """``Delta = a - p``."""
        return torch.sub(start, params, out=out)

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """``OuterOpt(A, Delta)``."""
        return self.outer.step(anchor, state, mean)

    def settings(self) -> dict[str, str]:
        """``sync_every`` and the outer optimizer's settings."""
        return {"sync_every": str(self.sync_every), **self.outer.settings()}
