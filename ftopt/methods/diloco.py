"""DiLoCo: many local steps of an inner optimizer, then one step of an outer optimizer on the mean
displacement.

Equations, with the symbols of ``method.py``::

    Delta_m = a - p_m                               a = cast(A)
    Delta   = sum_m (w_m / W) * Delta_m
    A      <- OuterOpt(A, Delta)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ftopt.methods.method import Method, Paced
from ftopt.methods.outer_optimizers import SGD, OuterOptimizerRule, check_outer
from ftopt.methods.triggers import LOCAL
from ftopt.methods.values import AnchorAndState, Execution, OuterState, Round

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OuterOptimized(Method):
    """The equations of `DiLoCo`.

    Args:
        outer: the outer optimizer. Default ``SGD(lr=0.7, momentum=0.9, nesterov=True)``.
    """

    outer: OuterOptimizerRule = field(default_factory=lambda: SGD(lr=0.7, momentum=0.9, nesterov=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outer(self.outer)

    @property
    def execution(self) -> Execution:
        return self.outer.execution

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return self.outer.init(anchor)

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round) -> AnchorAndState:
        return self.outer.step(anchor, state, mean)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Paced, OuterOptimized):
    """Distributed Low-Communication training: an outer optimizer on the mean of the replicas' displacements.

    Each replica keeps its inner optimizer's state (exchanging it gained nothing in the paper).

    Args:
        sync_every: inner steps between two outer steps (the paper's H), >= 1. Default 500, the paper's. 30 to
            100 costs less in quality.
        outer: the outer optimizer. Default ``SGD(lr=0.7, momentum=0.9, nesterov=True)``, the paper's; `Adam`,
            `Torch` or a rule of your own. In a run of only a dozen outer steps, momentum 0.5 does better than 0.9.
        others: see `Paced` and `Method`.

    Source: arXiv 2311.08105, algorithm 1. Ours weights by the inner steps that a replica contributes (the paper's
        replicas all contribute H; for data of different sizes it weights by those sizes), and casts the anchor to the
        parameters' dtype first.
    """

    name: ClassVar[str] = "diloco"

    sync_every: int | None = field(default=500, metadata=LOCAL)
