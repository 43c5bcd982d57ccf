"""SlowMo: momentum over the averages of local SGD, in units of the inner rate.

Equations, with the symbols of ``method.py``; ``u`` is the slow momentum (0 at first), ``lr_m,s`` the inner rate of step
``s`` of the ``H_m`` steps that replica ``m`` contributes:

    Delta = sum_m (w_m / W) * (a - p_m)             a = cast(A)
    gamma = sum_m (w_m / W) * (1 / H_m) * sum_s lr_m,s
    u    <- beta * u + Delta / gamma
    A    <- A - alpha * gamma * u
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ftopt.common.later import torch
from ftopt.errors import check_choice, check_number
from ftopt.methods.method import Method
from ftopt.methods.triggers import LOCAL
from ftopt.methods.values import AnchorAndState, Execution, OuterState, ReplicaView, Round, without_tensors

if TYPE_CHECKING:
    from torch import Tensor

NO_RATE = 1e-12
"""A rate of at most this counts as 0: its steps are below fp32's resolution."""


@dataclass(frozen=True, kw_only=True)
class SlowMo(Method):
    """Slow momentum over local SGD: the outer momentum is measured in inner rates.

    At a constant inner rate it is `DiLoCo` with ``SGD(lr=slow_lr, momentum=slow_momentum)`` outside; the two differ
    where a schedule or a warm-up changes the rate between rounds. ``gamma`` is the mean rate of the steps in the round,
    since ``Delta`` is a sum over them: where the rate changes within a round, ``Delta / gamma`` still has the size of a
    constant rate's. A rate that falls to 0 at the end of a round, or restarts, does not upset ``u``. With several
    parameter groups the largest rate of each step counts: one number for all groups, so that rates in a fixed ratio
    change nothing. Where ``gamma`` is 0 (all steps had rate 0), ``A <- A - alpha * Delta``, the equations' limit, and
    ``u`` does not change.

    Args:
        sync_every: inner steps between two outer steps (the paper's tau), >= 1. Default 12, the paper's.
        slow_lr: alpha, > 0. Default 1, the paper's best.
        slow_momentum: beta, in [0, 1). Default 0.6; the paper's best are from 0.4 to 0.8. With 0 and ``slow_lr=1`` this
            is `LocalSGD`.
        inner_state: what happens to the inner optimizer's state when a round is applied. ``keep`` (default): each
            replica keeps its own, the paper's choice for Adam. ``reset``: it returns to its state before the first step
            (Adam's step count too); the paper's choice for Nesterov SGD. ``average``: moments and momentum buffers are
            averaged with the parameters (SGD with momentum, the Adam family, Muon): two or three times the payload,
            fp32 only.
        others: see `Method`.

    Special cases: Lookahead (arXiv 1907.08610) is one replica, ``slow_momentum=0``, ``slow_lr`` its alpha,
    ``sync_every`` its k. BMUF (block momentum, Chen and Huo 2016) is ``slow_momentum`` its block momentum and
    ``slow_lr`` its block rate, at a constant inner rate; its Nesterov variant is `DiLoCo`.

    Source: arXiv 1910.00643, algorithm 1, with local SGD as the base. Ours weights by steps, and takes the mean of a
    round's rates where the paper has one rate for the whole round.
    """

    name: ClassVar[str] = "slowmo"
    execution = Execution(elementwise=True)

    sync_every: int = field(default=12, metadata=LOCAL)
    slow_lr: float = 1.0
    slow_momentum: float = 0.6
    inner_state: str = "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("slow_lr", self.slow_lr, "(0, inf)", hint="use 1")
        check_number("slow_momentum", self.slow_momentum, "[0, 1)", hint="use 0.4 to 0.8")
        hint = "use keep for Adam, reset for Nesterov SGD"
        check_choice("inner_state", self.inner_state, ("keep", "reset", "average"), hint)

    @without_tensors
    def scalars(self, view: ReplicaView) -> tuple[float, ...]:
        return (view.lr,)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round) -> AnchorAndState:
        """The equations above, with one rounding per operation."""
        gamma, u = round.mean(0), state["momentum"]
        if gamma <= NO_RATE:
            return torch.sub(anchor, mean.mul_(self.slow_lr), out=mean), {"momentum": u.clone()}
        u = torch.mul(u, self.slow_momentum).add_(mean.mul_(1 / gamma))
        return torch.sub(anchor, torch.mul(u, self.slow_lr * gamma, out=mean), out=mean), {"momentum": u}
