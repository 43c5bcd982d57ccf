"""How parameters take up a new anchor when steps have been taken since: rebased, or mixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftopt.optimizer.buffers import keep_between
from ftopt.optimizer.flat import FlatView


def rebased(view: FlatView, base: Tensor, start: Tensor, unknown: Sequence[slice], *, out: Tensor) -> Tensor:
    """``out <- cast(new anchor) + (params - base)``: the pending work on the new anchor.

    With the cast, so that ``params - start`` is the work again and what the parameters' dtype rounds off
    the anchor is not taken for work.

    Args:
        view: the parameters.
        base: what the pending work is measured from, flat fp32.
        start: the new anchor, rounded to the parameters' dtypes, flat fp32.
        unknown: where ``base`` is damaged: there the parameters become the anchor's.
        out: flat fp32, overwritten.
    """
    moved, behind = view.read(out), slice(view.trained, None)
    buffers = moved[behind].clone()
    moved.sub_(base).add_(start)
    keep_between(moved[behind], buffers, start[behind])
    for block in unknown:
        moved[block] = start[block]
    return moved


def mixed(view: FlatView, start: Tensor, alpha: float, *, out: Tensor) -> Tensor:
    """``out <- alpha * params + (1 - alpha) * cast(new anchor)``, Streaming DiLoCo's (arXiv 2501.18512)."""
    return view.read(out).mul_(alpha).add_(torch.mul(start, 1 - alpha))
