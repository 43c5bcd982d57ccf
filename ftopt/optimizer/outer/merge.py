"""How parameters follow a new anchor when steps have been taken since: rebased, or mixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftopt.optimizer.tensors.buffers import keep_between
from ftopt.optimizer.tensors.flat import FlatView
from ftopt.optimizer.tensors.mapped import behind
from ftopt.optimizer.tensors.pieces import Measured, piece_of


@torch.no_grad()
def rebase_(view: FlatView, base: Tensor, start: Tensor, unknown: Sequence[slice]) -> bool:
    """``params <- cast(new anchor) + (params - base)``: the pending work on the new anchor. One sweep.

    With the cast, so that ``params - start`` is the work again and what the parameters' dtype rounds off
    the anchor is not taken for work.

    Args:
        view: the parameters.
        base: what the pending work is measured from, flat fp32.
        start: the new anchor, rounded to the parameters' dtypes, flat fp32.
        unknown: where ``base`` is damaged: there the parameters become the anchor's.

    Returns:
        False: something was not finite, and the parameters are of no use.
    """
    if unknown:
        now, base = view.read(view.empty()), base.clone()
        for block in unknown:
            base[block] = now[block]
    size = piece_of(start)
    scratch, measured = start.new_empty(min(size, start.numel())), Measured()
    for part, where in behind(view.parts(size), base, start):
        before, after = base[where].view(part.shape), start[where].view(part.shape)
        if part.dtype == torch.float32 and where.start < view.trained:
            measured.see(part.sub_(before).add_(after))
            continue
        room = scratch[: part.numel()].view(part.shape) if part.numel() <= scratch.numel() else torch.empty_like(after)
        moved = torch.sub(part, before, out=room).add_(after)
        if where.start >= view.trained:
            keep_between(moved, part, after)
        measured.see(moved)
        part.copy_(moved)
    return measured.finite


def mixed(view: FlatView, start: Tensor, alpha: float, *, out: Tensor) -> Tensor:
    """``out <- alpha * params + (1 - alpha) * cast(new anchor)``, Streaming DiLoCo's (arXiv 2501.18512)."""
    return view.read(out).mul_(alpha).add_(torch.mul(start, 1 - alpha))
