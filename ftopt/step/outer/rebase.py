"""How pending work gets onto a new anchor: rebased, or mixed with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftopt.step.tensors.buffers import keep_possible
from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.mapped import behind
from ftopt.step.tensors.pieces import piece_of


def mix_(now: Tensor, start: Tensor, alpha: float) -> Tensor:
    """``now <- alpha * now + (1 - alpha) * start``, as in Streaming DiLoCo (arXiv 2501.18512); ``now``. Written so that
    what nobody has moved stays as it is, and alpha 0 and 1 are exactly ``start`` and ``now``."""
    if alpha < 0.5:
        return now.sub_(start).mul_(alpha).add_(start)
    return now.sub_(torch.sub(now, start).mul_(1 - alpha))


class Rebase:
    """``params <- cast(new anchor) + (params - base)``: the pending work on the new anchor. One sweep.

    With the cast, ``params - start`` is the work again, without what the parameters' dtype rounds off the anchor.

    An exception may come at any line of the sweep; it then goes on where it was: a part that is being written is kept,
    and written once more, not moved once more.

    Args:
        base: what the pending work is measured from, flat fp32.
        start: the new anchor, rounded to the parameters' dtypes, flat fp32.
        unknown: where ``base`` is damaged: there the parameters become the anchor's.
    """

    def __init__(self, view: FlatView, base: Tensor, start: Tensor, unknown: Sequence[slice]) -> None:
        if unknown:
            now, base = view.read(view.empty()), base.clone()
            for block in unknown:
                base[block] = now[block]
        self._view, self._base, self._start = view, base, start
        self._size = piece_of(start)
        self._scratch = start.new_empty(min(self._size, start.numel()))
        self._sums: list[Tensor] = []
        self._done = 0  # elements that are moved
        self._moved: Tensor | None = None  # the part after them, as it is to be

    @torch.no_grad()
    def go_on(self) -> bool:
        """Sweeps over what is left. False: something was not finite, and the parameters are void."""
        for part, where in behind(self._view.parts(self._size), self._base, self._start):
            if where.stop <= self._done:
                continue
            if self._moved is None:
                moved = self._move(part, where)
                self._sums.append(moved.sum())
                self._moved = moved
            part.copy_(self._moved)
            self._done, self._moved = where.stop, None
        if not self._sums or bool(torch.isfinite(torch.stack(self._sums)).all()):  # then so are their terms
            return True
        return all(bool(torch.isfinite(part).all()) for part, _ in self._view.parts(self._size))

    def _move(self, part: Tensor, where: slice) -> Tensor:
        before, after = self._base[where].view(part.shape), self._start[where].view(part.shape)
        room = self._scratch[: part.numel()].view(part.shape) if part.numel() <= self._scratch.numel() else None
        moved = torch.sub(part, before, out=room).add_(after)
        if where.start >= self._view.trained:
            keep_possible(self._view.name_at(where.start), moved, part, after)
        return moved
