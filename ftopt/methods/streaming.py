"""Streaming DiLoCo: DiLoCo fragment by fragment, while training goes on.

Equations for a fragment with anchor ``A``, with the symbols of ``method.py``. Fragment ``f`` of ``P`` has the offset
``t_f = ceil(f * H / P)``. Its snapshots are taken at inner steps ``t >= 1`` with ``(t - t_f) mod H = 0``:

    Delta_m = a - p_m(t)                            the snapshot; training goes on
    Delta   = sum_m (w_m / W) * Delta_m
    A'      = OuterOpt(A, Delta)
    at t + tau:
    p_m    <- cast(A') + (p_m(t + tau) - p_m(t))                    rebased (mix = None): keeps the overlapped steps
    p_m    <- alpha * p_m(t + tau) + (1 - alpha) * cast(A')         alpha = mix, the paper's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ftopt.errors import UserError, check_number, check_whole
from ftopt.methods.diloco import OuterOptimized
from ftopt.methods.fragments import Parameter, Partition, Strided
from ftopt.methods.outer_optimizers import SGD
from ftopt.methods.timing import Timing
from ftopt.methods.triggers import LOCAL
from ftopt.methods.values import Overlap


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(OuterOptimized):
    """DiLoCo whose parameters are synchronized fragment by fragment, while training goes on.

    Peak traffic is one fragment's, and a reduction may take as long as ``delay`` inner steps without stopping the
    training thread.

    Args:
        sync_every: inner steps between two outer steps of one fragment (the paper's H), >= 1. Default 100, the paper's.
            Need not be a multiple of the number of fragments.
        fragments: which parameters make a fragment. Default ``Strided(n=3)``.
        delay: inner steps from a fragment's snapshot to the application of its result (the paper's tau), 0 to
            ``sync_every - 1``. Default 1, the paper's; up to 5 is advised there, and 10 changed the loss by less than
            0.2 %. 0: training waits for each fragment. More than ``sync_every / P``: several fragments are under way at
            once.
        mix: None (default): the overlapped steps are rebased onto the new anchor, and none is lost. A number alpha in
            [0, 1]: the result is mixed in, with that share of the replica's own parameters; 0.5 is the paper's, 0 drops
            the overlapped steps, 1 ignores the result. The share ``1 - alpha`` of the overlapped steps that mixing
            overwrites is counted as discarded; with ``delay=0`` no steps overlap, and none are discarded. The share
            that a replica keeps is in its next snapshot again. A result is mixed in exactly ``delay`` steps after the
            snapshot; a later result is rebased. No mixing before ``average_until_step``.
        wait_for_result_s: seconds that training waits, ``delay`` steps after the snapshot, for a fragment that is still
            undecided. After that, and at once when the attempt fails, it trains on and applies the result when it
            arrives. Default 0: training never stops for it. A large value is the paper's behaviour: exactly
            ``delay`` steps, and reproducible runs; use it with ``mix``.
        outer: as in `DiLoCo`; ``paper`` is ``SGD(lr=0.4, momentum=0.9, nesterov=True)``.
        others: see `Method`.

    Source: arXiv 2501.18512, algorithm 2. The paper mixes (``mix=0.5``); our default rebases.
    """

    name: ClassVar[str] = "streaming_diloco"
    paper: ClassVar[SGD] = SGD(lr=0.4, momentum=0.9, nesterov=True)

    sync_every: int = field(default=100, metadata=LOCAL)
    fragments: Partition = field(default_factory=lambda: Strided(n=3))
    delay: int = field(default=1, metadata=LOCAL)
    mix: float | None = None
    wait_for_result_s: float = field(default=0.0, metadata=LOCAL)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("delay", self.delay, 0, of="inner steps", hint="use 1 to 5")
        if self.delay >= self.sync_every:
            raise UserError(
                f"delay={self.delay!r} with sync_every={self.sync_every}; must be from 0 to {self.sync_every - 1}: a "
                "fragment's result is applied before it is due again; use 1 to 5"
            )
        if self.mix is not None:
            hint = "0 is the anchor, 1 the replica's own parameters; use None to rebase (no step is lost), 0.5 to mix"
            check_number("mix", self.mix, "[0, 1]", hint=hint)
        check_number("wait_for_result_s", self.wait_for_result_s, "[0, inf)", of="seconds")
        if isinstance(self.fragments, type) or not callable(getattr(self.fragments, "fragments", None)):
            raise UserError(
                f"fragments={self.fragments!r}; must be a rule of ftopt.fragments; use ftopt.fragments.Strided(n=3)"
            )

    def partition(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        return self.fragments.fragments(parameters)

    @property
    def timing(self) -> Timing:
        """Fragments are due in turn, spread over H; their steps count from ``average_until_step``."""
        return replace(super().timing, staggered=True)

    @property
    def overlap(self) -> Overlap:
        return Overlap(delay=self.delay, mix=self.mix, wait_for_result_s=self.wait_for_result_s)
