"""Streaming DiLoCo: DiLoCo fragment by fragment, beside the training.

Equations for a fragment with anchor ``A``, with the letters of ``method.py``. Fragment ``f`` of ``P`` is due at inner
steps ``t = ceil(f * H / P) + k * H`` (f = 0: ``k * H``, k >= 1)::

    Delta_m = a - p_m(t)                            the snapshot; training goes on
    Delta   = sum_m (w_m / W) * Delta_m
    A'      = OuterOpt(A, Delta)
    at t + tau:
    p_m    <- cast(A') + (p_m(t + tau) - p_m(t))    merge = rebase: keeps the overlapped steps
    p_m    <- alpha * p_m(t + tau) + (1 - alpha) * cast(A')         merge = mix, the paper's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ftopt.methods.diloco import DiLoCo
from ftopt.methods.fragments import Parameter, Partition, Strided
from ftopt.methods.method import LOCAL
from ftopt.methods.outer_optimizers import SGD, OuterOptimizerRule
from ftopt.methods.triggers import check_sync_every

MERGES = ("rebase", "mix")


def _outer() -> OuterOptimizerRule:
    return SGD(lr=0.4, momentum=0.9, nesterov=True)


def _three() -> Partition:
    return Strided(n=3)


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo whose parameters meet fragment by fragment, while training goes on.

    Peak traffic is that of one fragment, and a reduction may take as long as ``delay`` inner steps without stopping
    the training thread.

    Args:
        sync_every: inner steps between two outer steps of one fragment (the paper's H), >= 1. Default 100, the paper's.
            Need not be a multiple of the number of fragments.
        fragments: which parameters make a fragment. Default ``Strided(n=3)``.
        delay: inner steps from a fragment's snapshot to its take-over (the paper's tau), 0 to ``sync_every - 1``.
            Default 1, the paper's; up to 5 is advised there, and 10 changed the loss by less than 0.2 %. 0: training
            waits for each fragment. More than ``sync_every / P``: several fragments are under way at once.
        merge: ``rebase`` (default): the overlapped steps are moved onto the new anchor. ``mix``: the paper's, with
            ``alpha``; it overwrites a share ``1 - alpha`` of the overlapped steps, which is counted as discarded.
        alpha: the share of the replica's own parameters when mixed, in [0, 1]; 0 drops the overlapped steps, 1 never
            takes up anything. Default 0.5, the paper's. Applied exactly ``delay`` steps after the snapshot; what comes
            later is rebased.
        wait_for_result_s: seconds that training waits, ``delay`` steps after the snapshot, for a fragment that is not
            decided yet. After that, and at once when the attempt fails, it trains on and takes the result up when it is
            there. Default 0: training never stands still for it. A large one is the paper's behaviour: exactly
            ``delay`` steps, and the same run twice; it is what ``mix`` wants.
        outer: the outer optimizer. Default ``SGD(lr=0.4, momentum=0.9, nesterov=True)``, the paper's.
        others: see `Method`.

    Raises:
        ValueError: a setting is out of range; the message says what is allowed.

    Source: arXiv 2501.18512, algorithm 2. Differs in the default merge: the paper's mixes (``merge="mix"``).
    """

    name: ClassVar[str] = "streaming_diloco"

    sync_every: int = field(default=100, metadata=LOCAL)
    fragments: Partition = field(default_factory=_three)
    delay: int = field(default=1, metadata=LOCAL)
    merge: str = "rebase"
    alpha: float = 0.5
    wait_for_result_s: float = field(default=0.0, metadata=LOCAL)
    outer: OuterOptimizerRule = field(default_factory=_outer)

    def __post_init__(self) -> None:
        check_sync_every(self.sync_every)
        super().__post_init__()
        if isinstance(self.delay, bool) or not 0 <= self.delay < self.sync_every:
            raise ValueError(
                f"delay={self.delay!r} with sync_every={self.sync_every}; must be from 0 to {self.sync_every - 1}: a "
                "fragment is taken up before it is due again; use 1 to 5"
            )
        if self.merge not in MERGES:
            raise ValueError(f"merge={self.merge!r}; allowed: {', '.join(MERGES)}; rebase loses no step")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha!r}; must be from 0 (the anchor) to 1 (the replica's own)")
        if not self.wait_for_result_s >= 0:
            raise ValueError(f"wait_for_result_s={self.wait_for_result_s!r}; must be a number of seconds, 0 or more")
        if not callable(getattr(self.fragments, "fragments", None)):
            raise ValueError(
                f"fragments={self.fragments!r}; must be Strided, Sequential, Balanced or Named; use "
                f"ftopt.fragments.Strided(n=3)"
            )

    def partition(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        """By the rule in ``fragments``."""
        return self.fragments.fragments(parameters)

    def phase(self, fragment: int, fragments: int, inner_step: int) -> int:
        """Offsets spread over H, so that fragment ``f`` is first due after ``ceil(f * H / P)`` steps (f = 0: H).

        Steps count from ``average_until_step``.
        """
        if fragment == 0:
            return 0
        offset = -(-fragment * self.sync_every // fragments)
        return (inner_step - self.average_until_step - offset) % self.sync_every

    @property
    def tau(self) -> int:
        """``delay``."""
        return self.delay

    @property
    def patience(self) -> float:
        """``wait_for_result_s``."""
        return self.wait_for_result_s

    @property
    def mix(self) -> float | None:
        """``alpha`` when ``merge`` is ``mix``."""
        return self.alpha if self.merge == "mix" else None
