"""DiLoCo: many local steps of an inner optimizer, then one step of an outer optimizer on the mean
displacement.

Equations, with the letters of ``method.py``::

    Delta_m = a - p_m                               a = cast(A)
    Delta   = sum_m (w_m / W) * Delta_m
    A      <- OuterOpt(A, Delta)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ftopt.methods.by_speed import BySpeed
from ftopt.methods.method import LOCAL, OuterState, Round
from ftopt.methods.outer_optimizers import OuterOptimizerRule, check_outer, nesterov


@dataclass(frozen=True, kw_only=True)
class DiLoCo(BySpeed):
    """Distributed Low-Communication training: an outer optimizer on the mean of the replicas' displacements.

    The inner optimizers' states stay with their replicas (exchanging them gained nothing in the paper).

    Args:
        sync_every: inner steps between two outer steps (the paper's H), >= 1. Default 500, the paper's. 30 to
            100 costs less in quality. Or ``balanced``.
        round_steps: with ``balanced``: inner steps of a round over all replicas, shared out by speed; see
            `ftopt.methods.by_speed`. Default: 500 for each.
        outer: the outer optimizer. Default ``SGD(lr=0.7, momentum=0.9, nesterov=True)``, the paper's; `Adam`,
            `Torch` or a rule of your own. With only a dozen outer steps in the run momentum 0.5 does better than 0.9.
        others: see `Method`.

    Raises:
        ValueError: a setting is out of range; the message says what is allowed.

    Source: arXiv 2311.08105, algorithm 1. Ours weights by the inner steps that a replica brings (the paper's replicas
        all bring H; for data of unlike sizes it weights by those), and casts the anchor to the parameters' dtype
        first.
    """

    name: ClassVar[str] = "diloco"

    usual_steps: ClassVar[int | None] = 500

    sync_every: int | str = field(default=500, metadata=LOCAL)
    outer: OuterOptimizerRule = field(default_factory=nesterov)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outer(self.outer)

    @property
    def on_shares(self) -> bool:
        """The outer optimizer's."""
        return self.outer.on_shares

    @property
    def elementwise(self) -> bool:
        """If the outer optimizer is."""
        return getattr(self.outer, "elementwise", False)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """The outer optimizer's."""
        return self.outer.init(anchor)

    def outer_step(
        self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``OuterOpt(A, Delta)``."""
        return self.outer.step(anchor, state, mean)
