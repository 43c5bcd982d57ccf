"""SyncSGD: gradients are averaged before each inner step; the inner optimizers of all replicas take the same step.

Equations, for the gradients ``g_m`` of a replica's ``n_m`` micro-batches since the last step:

    g      = sum_m (w_m / W) * (1 / n_m) * sum g_m        n_m = 1, unless the replica was cut off
    params <- Inner(params, g)                            on every replica alike
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ftopt.common.later import torch
from ftopt.errors import UserError, check_number, check_whole
from ftopt.methods.fragments import Parameter
from ftopt.methods.method import Method
from ftopt.methods.triggers import LOCAL
from ftopt.methods.values import AnchorAndState, OuterState, ReplicaView, Round

if TYPE_CHECKING:
    from torch import Tensor

GRADIENT = "gradient"
"""The name of the agreed gradient in the outer state."""


@dataclass(frozen=True, kw_only=True)
class SyncSGD(Method):
    """Synchronous data-parallel training through the outer-sync layer: the baseline for all other methods.

    The first fragment carries gradients instead of parameters: a replica contributes the sum of its gradients that no
    round has counted yet. A replica that is cut off does not change its model; its gradients add up and go into the
    next round. The committed state is the model with the inner optimizer's state, so that a joiner takes the same steps
    as the others.

    Args:
        sync_every: backward passes per round, >= 1. Default 1.
        clip_norm: the averaged gradient is clipped to this L2 norm, and each replica's copy again if corruption has
            made it longer. None (default): no clipping. Clipping before ``step()`` clips each replica's own.
        verify_every: versions between two comparisons of the replicas' models and inner states, which should be equal
            bit for bit. Replicas in the minority take over the majority's (event ``diverged``); replicas whose machines
            round differently (``unlike``) are made equal again. >= 1; None: never. Default 50.
        others: see `Method`.

    Source: the synchronous baseline of every paper here.
    """

    name: ClassVar[str] = "sync_sgd"

    sync_every: int = field(default=1, metadata=LOCAL)
    clip_norm: float | None = None
    verify_every: int | None = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trigger is not None:
            raise UserError(
                f"trigger={type(self.trigger).__name__}; sync_sgd exchanges gradients every sync_every steps, with no "
                "trigger; paft takes one for its parameters"
            )
        if self.average_until_step:
            raise UserError(
                f"average_until_step={self.average_until_step}; sync_sgd averages gradients from the first step on, "
                "and has no parameters to average before that; leave it at 0"
            )
        if self.buffers == "mean":
            raise UserError(
                "buffers=mean; sync_sgd exchanges gradients alone, and has no round of parameters, which buffers could "
                "go with; use buffers=local, or paft"
            )
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "(0, inf)", hint="1.0 is usual; use None for no clipping")
        if self.verify_every is not None:
            check_whole("verify_every", self.verify_every, 1, of="versions", hint="50 is usual; use None for never")

    @property
    def gradients(self) -> SyncSGD:
        return self

    def partition(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        """No fragments: parameters are not exchanged."""
        return []

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return {GRADIENT: torch.zeros_like(anchor)}

    def payload(self, view: ReplicaView, out: Tensor) -> Tensor:
        """The mean of this replica's accumulated gradients; ``view.params`` holds minus their sum."""
        return torch.div(view.params, -view.steps, out=out)

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round) -> AnchorAndState:
        """The anchor stays 0; the mean, clipped, is the state."""
        if self.clip_norm is not None:
            # In fp64, then rounded to fp32: CPUs that sum in different orders must clip equally.
            norm = float(torch.linalg.vector_norm(mean, dtype=torch.float64).float())
            mean = mean.mul_(min(1.0, self.clip_norm / (norm + 1e-6)))
        return anchor, {GRADIENT: mean}
