"""The face that every method shows to the optimizer.

Legend, the same letters in all methods' files:

=========  ==========================================================================================
``A``      the anchor, flat fp32
``a``      ``cast(A)``: the anchor rounded to the parameters' dtypes; what replicas start from
``p``      this replica's parameters at its snapshot, flat fp32 (exact for bf16 and fp16 too)
``Delta``  the outer gradient ``a - p``, a direction of descent: outer optimizers *subtract* it
``w``      this replica's weight, ``W`` the sum of all members' weights; ``w / W`` is its share
=========  ==========================================================================================

``a`` and not ``A`` in ``Delta``: with ``A - p`` a bf16 replica re-counts its own rounding in every round, and
four such replicas made 12 % of the true progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ftopt.methods.triggers import Progress

OuterState = Mapping[str, Tensor]
"""Outer optimizer state of one fragment: name -> flat fp32 tensor of the anchor's length."""


class Method(Protocol):
    """A semi-synchronous method: settings and equations, no state, no I/O.

    Everything here must give the same bits on every member of a quorum that gives it the same tensors.
    """

    @property
    def name(self) -> str:
        """The recipe's name for it, one lower-case word."""

    def fragments(self) -> int:
        """How many subsets of the parameters have outer steps of their own. Plain methods: 1."""

    def due(self, progress: Progress) -> bool:
        """Is it time for this replica to propose a contribution?"""

    def weight(self, *, steps: int, tokens: int) -> float:
        """This replica's weight in the mean, >= 0, for a contribution of ``steps`` inner steps and ``tokens``
        tokens."""

    def before_inner_step(self, progress: Progress) -> None:
        """Called before each ``inner.step()``: where methods that exchange gradients do so. Here: nothing."""

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """The outer state at version 0."""

    def payload(self, anchor: Tensor, start: Tensor, params: Tensor, *, alone: bool, out: Tensor) -> Tensor:
        """What this replica sends, before it is multiplied by its share ``w / W``.

        Args:
            anchor: ``A``, flat fp32.
            start: ``a``, flat fp32; the same tensor as ``anchor`` when all parameters are fp32.
            params: ``p``, flat fp32.
            alone: no other member has a positive weight: the mean is this replica's payload.
            out: flat fp32, overwritten.

        Returns:
            ``out``.
        """

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The next anchor and outer state from the weighted mean of the payloads.

        ``mean`` may be overwritten and may be returned as the anchor. ``anchor`` and ``state`` are left as
        they are, and nothing returned shares memory with them.
        """

    def settings(self) -> dict[str, str]:
        """What must agree among the replicas of a job, besides `name`: setting -> value."""
