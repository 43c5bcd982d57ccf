"""Moves pending work to a new anchor, by a rebase or by mixing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftopt.step.tensors.buffers import keep_possible
from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.mapped import behind
from ftopt.step.tensors.pieces import piece_of


def mix(now: Tensor, start: Tensor, alpha: float, out: Tensor | None = None) -> Tensor:
    """``alpha * now + (1 - alpha) * start``, fp32, as in Streaming DiLoCo (arXiv 2501.18512). Values that nobody has
    moved stay equal, and alpha 0 and 1 give exactly ``start`` and ``now``."""
    apart = torch.sub(now, start, out=out)
    return apart.mul_(alpha).add_(start) if alpha < 0.5 else torch.sub(now, apart.mul_(1 - alpha), out=apart)


class Rebase:
    """``params <- cast(new anchor) + (params - base)``: the pending work on the new anchor; or the `mix` of the
    parameters and the new anchor. One sweep.

    Because of the cast, ``params - start`` is the work again, without the bits of the anchor that the parameters' dtype
    rounds off.

    After an exception at any line, the sweep resumes where it was: a part that was being written is kept, and is
    written again but not moved again.

    Args:
        base: the base of the pending work, flat fp32.
        start: the new anchor, rounded to the parameters' dtypes, flat fp32.
        unknown: the parts where ``base`` is damaged, in which the parameters become the anchor's.
        alpha: of the mix, which needs no base; None: a rebase.
    """

    def __init__(
        self,
        view: FlatView,
        base: Tensor,
        start: Tensor,
        unknown: Sequence[slice] = (),
        alpha: float | None = None,
    ) -> None:
        if unknown:
            now, base = view.read(view.empty()), base.clone()
            for block in unknown:
                base[block] = now[block]
        self._view, self._base, self._start, self._alpha = view, base, start, alpha
        self._size = piece_of(start)
        self._scratch = start.new_empty(min(self._size, start.numel()))
        self._sums: list[Tensor] = []
        self._done = 0  # number of elements moved
        self._moved: Tensor | None = None  # the moved values of the next part

    @torch.no_grad()
    def go_on(self) -> bool:
        """Sweeps over the remaining parts. False: a value was not finite, and the parameters are void."""
        for part, where in behind(self._view.parts(self._size), self._base, self._start):
            if where.stop <= self._done:
                continue
            if self._moved is None:
                moved = self._move(part, where)
                self._sums.append(moved.sum())
                self._moved = moved
            part.copy_(self._moved)
            self._done, self._moved = where.stop, None
        if not self._sums or bool(torch.isfinite(torch.stack(self._sums)).all()):  # then all terms are finite, too
            return True
        return all(bool(torch.isfinite(part).all()) for part, _ in self._view.parts(self._size))

    def _move(self, part: Tensor, where: slice) -> Tensor:
        after = self._start[where].view(part.shape)
        room = self._scratch[: part.numel()].view(part.shape) if part.numel() <= self._scratch.numel() else None
        if self._alpha is not None:
            return mix(part, after, self._alpha, room)
        moved = torch.sub(part, self._base[where].view(part.shape), out=room).add_(after)
        if where.start >= self._view.trained:
            keep_possible(self._view.name_at(where.start), moved, part, after)
        return moved
