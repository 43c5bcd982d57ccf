"""PAFT: averages gradients in every step and parameters periodically, against corruption in between.

Setting: each replica's own copy of the agreed gradient may be corrupted after the aggregation, ``g_m = g + eps_m``, so
that replicas that should be equal drift apart. Equations:

    every inner step    params_m <- Inner(params_m, g_m)          g as in ``sync_sgd.py``
    every H steps       A        <- sum_m (w_m / W) * params_m    (PAFT-Sync)
                        params_m <- A + (params_m - snapshot_m)   one step later (PAFT-Dyn), which hides it

With plain SGD of rates ``eta_s`` and normal noise of variance ``sigma^2`` on each of ``d`` elements the drift is
``E|A - params_m|^2 = ((M - 1) / M) * d * sigma^2 * sum_s eta_s^2`` since the last average. (The paper prints
``(M + 1) / M`` and no ``d``.) Momentum and Adam drift differently.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ftopt.errors import check_choice
from ftopt.methods.local_sgd import Averaging
from ftopt.methods.method import Method
from ftopt.methods.sync_sgd import SyncSGD
from ftopt.methods.timing import Timing
from ftopt.methods.triggers import LOCAL
from ftopt.methods.values import Overlap


@dataclass(frozen=True, kw_only=True)
class PAFT(Averaging):
    """Average gradients every step and parameters every ``sync_every`` steps.

    By default each replica keeps its inner optimizer's moments: their drift does not add up. A replica that joins, or
    was cut off, fetches the model and the inner state of a peer unchanged; its parameters are averaged with the others'
    once it has taken a step with them. Replicas are not compared as in `SyncSGD`: between two averages they are
    expected to differ.

    Args:
        sync_every: inner steps between two averages of the parameters (the paper's H), >= 1. Default 50, the
            longest of the paper's 5, 10 and 50.
        delay: inner steps from the snapshot to the application of the average: 0 (default, PAFT-Sync), or 1, which
            hides the averaging behind the next step (PAFT-Dyn); that step of the replica is kept.
        clip_norm: the averaged gradient is clipped to this L2 norm, and each replica's copy again if corruption has
            made it longer. None (default): no clipping.
        inner_state: the inner optimizer's moments stay with their replica (``keep``, default), or are averaged with the
            parameters (``average``; SGD with momentum, the Adam family, Muon): two or three times the payload, fp32
            only.
        average_until_step: until this step parameters are averaged after every step, without ``delay``; gradients are
            always averaged in every step. Default 0.
        others: see `Method`.

    Source: PAFT (OpenReview cPZepCZlFW). Ours weights by steps.
    """

    name: ClassVar[str] = "paft"

    sync_every: int = field(default=50, metadata=LOCAL)
    delay: int = 0
    clip_norm: float | None = None
    inner_state: str = "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        SyncSGD(clip_norm=self.clip_norm)  # checks clip_norm
        check_choice("delay", self.delay, (0, 1), "0 is PAFT-Sync, 1 PAFT-Dyn")
        check_choice("inner_state", self.inner_state, ("keep", "average"))

    @property
    def gradients(self) -> Method:
        # Never compared: replicas are expected to differ between two averages, which show and repair it.
        return SyncSGD(
            clip_norm=self.clip_norm,
            verify_every=None,
            weights=self.weights,
            codec=self.codec,
            error_feedback=self.error_feedback,
        )

    @property
    def timing(self) -> Timing:
        """Averages are due at multiples of H, so that a joiner is due with the others; with a trigger, when it
        fires."""
        return replace(super().timing, aligned=True)

    @property
    def overlap(self) -> Overlap:
        """Training waits for the result after ``delay`` steps, as in the paper."""
        return Overlap(delay=self.delay, wait_for_result_s=60.0)
