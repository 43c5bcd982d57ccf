"""Decoupled DiLoCo: streaming DiLoCo whose learners never wait for each other.

Equations for a fragment, with the symbols of ``method.py`` and ``RDA`` of ``aggregation.py``, tensor by tensor:

    w_m   = tokens_m * (tokens_m / steps_m)
    v_m   = a - p_m(t)                              the snapshot; training goes on
    Delta = RDA(v_1 .. v_M)                         embeddings: sum_m (w_m / W) * v_m
    A'    = OuterOpt(A, Delta)
    p_m  <- cast(A') + (p_m(t + tau) - p_m(t))      tau steps after the snapshot, or later
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ftopt.errors import UserError, check_number
from ftopt.methods.aggregation import DIRECTIONS, RadialDirectional, directions_, lengths
from ftopt.methods.fragments import Balanced, Partition
from ftopt.methods.streaming import StreamingDiLoCo
from ftopt.methods.triggers import AT_MEAN, LOCAL
from ftopt.methods.values import Execution, Overlap, ReplicaView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DecoupledDiLoCo(StreamingDiLoCo):
    """For learners of different speeds: small fragments, no waiting, and directions and lengths averaged separately.

    Args:
        sync_every: inner steps between two outer steps of one fragment (the paper's H), >= 1. Default 24, the paper's.
        fragments: which parameters make a fragment. Default ``Balanced(n=24)``, the paper's; in a recipe ``fragments:
            {n: 6}`` without a name is balanced, too.
        delay: inner steps from a fragment's snapshot to the application of its result (the paper's tau). Default 2, the
            paper's.
        wait_for_result_s: seconds that training waits for a fragment that is still undecided after ``delay`` steps.
            Default 0: its result is applied when it arrives.
        adaptive_grace: gamma of the adaptive grace, >= 0: replicas still at work are called in
            ``gamma * (tau * step - quorum - sync)`` seconds after ``policy.min_replicas`` (the paper's quorum K) have
            proposed: the time that training hides, less what quorum and reduction take (moving averages); at most
            ``policy.grace_s``. Default 1. 0: always ``policy.grace_s``, as with ``delay=0``, which hides nothing.
        weights: default ``tokens_per_step``, the paper's: tokens times tokens per step, so that a replica with larger
            batches counts for more than its tokens alone. Without ``optimizer.log``: steps.
        others: see `StreamingDiLoCo` and `Method`.

    Source: arXiv 2604.21428. The paper leaves open, and we decide: where the directions cancel (their mean is shorter
    than 1e-3), their mean is multiplied by the mean length without being normalised; a single contribution is used
    unchanged; overlapped steps are rebased.
    """

    name: ClassVar[str] = "decoupled_diloco"
    aggregation = RadialDirectional()

    sync_every: int = field(default=24, metadata=LOCAL)
    fragments: Partition = field(default_factory=lambda: Balanced(n=24))
    delay: int = field(default=2, metadata=LOCAL)
    wait_for_result_s: float = field(default=0.0, metadata=LOCAL)
    weights: str = "tokens_per_step"
    adaptive_grace: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("adaptive_grace", self.adaptive_grace, "[0, 1e6]", hint="use 1, or 0 for policy.grace_s")
        if self.timing.uses & AT_MEAN:
            raise UserError(
                "trigger: decoupled_diloco sends directions, whose distances do not say how far replicas are apart; "
                "use linear_fda or local_condition"
            )

    @property
    def overlap(self) -> Overlap:
        return replace(super().overlap, adaptive_grace=self.adaptive_grace)

    @property
    def execution(self) -> Execution:
        """Not elementwise: directions belong to whole tensors."""
        return replace(super().execution, elementwise=False)

    def scalars(self, view: ReplicaView) -> tuple[float, ...]:
        """``|v|`` of each tensor except embeddings; none in a round that only averages."""
        return () if view.averages else lengths(view.start - view.params, view.layout)

    def payload(self, view: ReplicaView, out: Tensor) -> Tensor:
        """``phi(v)`` of each tensor, but ``v`` of embeddings; ``v`` of all tensors if the replica is alone or the round
        averages."""
        v = super().payload(view, out)
        return directions_(v, view.layout) if self.aggregation.units(view) == DIRECTIONS else v
