"""The parameters of a contribution at its freezing (FREEZE): a copy, or the parameters in place.

While the training thread waits for a round nothing changes the parameters, so the round reads them in place, without a
copy. Before the training thread goes on, it calls `Frozen.thaw`.

On a GPU the parameters may still be being computed, or copied, when the training thread hands them over; each reader's
stream waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ftopt.common.streams import Point, finish, follow, reached
from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.pieces import piece_of


@dataclass(frozen=True, slots=True)
class Assumed:
    """The properties of a round that affect a payload; they are usually those of the previous round.

    Args:
        share: the payload's factor; None: no factor.
        alone, averages: as in `ftopt.methods.ReplicaView`.
    """

    share: float | None = None
    alone: bool = False
    averages: bool = False


class Frozen:
    """Frozen parameters. Any thread, except `thaw`.

    Attributes:
        copy: a copy of the parameters, flat fp32. None: they are read in place, until `thaw`.
        point: a point in the device's queue at which the parameters, and all work queued before the freezing, are
            complete.
    """

    def __init__(self, view: FlatView, copy: Tensor | None = None) -> None:
        self._view = view
        self.copy = copy
        self._gone, self._lock = False, threading.Lock()
        self._ready: tuple[Assumed, Tensor] | None = None
        self.point: Point = reached(view.device)

    def flat(self) -> Tensor:
        """The copy, which must exist."""
        assert self.copy is not None, "parameters that are frozen in place are read in parts"
        follow(self._view.device, self.point)
        return self.copy

    def read(self) -> Tensor:
        """The parameters, flat fp32; a copy of them if they are frozen in place."""
        if self.copy is not None:
            return self.flat()
        out = self._view.empty()
        with self.parts(piece_of(out)) as parts:
            for part, where in parts:
                out[where] = part.reshape(-1)
        return out

    def offer(self, assumed: Assumed, payload: Tensor) -> None:
        """Keeps a payload computed when the parameters were frozen."""
        self.point = reached(self._view.device)
        self._ready = assumed, payload

    def take(self, assumed: Assumed) -> Tensor | None:
        """Returns that payload, once, if its assumptions still hold; applies a missing share."""
        (found, payload), self._ready = self._ready or (None, None), None
        if payload is None or found is None or (found.alone, found.averages) != (assumed.alone, assumed.averages):
            return None
        if found.share == assumed.share:
            return payload
        return payload.mul_(assumed.share) if found.share is None and assumed.share is not None else None

    @contextmanager
    def parts(self, size: int) -> Iterator[Iterable[tuple[Tensor, slice]]]:
        """The parameters in parts of at most ``size`` elements, and where each lies in a flat tensor; `thaw` waits.
        InterruptedError: the training thread has gone on, so this round is over."""
        with self._lock:
            follow(self._view.device, self.point)
            if self.copy is not None:
                yield flat_parts(self.copy, size)
            elif self._gone:
                raise InterruptedError("the contribution is decided: its parameters have moved on")
            else:
                try:
                    yield self._view.parts(size)
                finally:
                    finish(self._view.device)

    def clamp(self, start: Tensor, peak: float, trained: int) -> int:
        """Resets elements further from ``start`` than any was at freezing, since their memory must have changed.

        Returns their number among the first ``trained`` elements. The removed values are neither in the contribution
        nor in the base of later work.
        """
        found = 0
        with self.parts(piece_of(start)) as parts:
            for part, where in parts:
                if where.start >= trained:
                    continue
                if where.stop > trained:  # a part of a copy, which is flat
                    part, where = part[: trained - where.start], slice(where.start, trained)
                before = start[where].view(part.shape)
                wrong = ~(torch.sub(before, part).abs_() <= peak)  # NaN is wrong, too
                if bool(wrong.any()):
                    found += int(wrong.sum())
                    part.copy_(torch.where(wrong, before, part))
        return found

    def thaw(self, *, keep: bool) -> None:
        """Lets the parameters change. Training thread. ``keep``: the contribution is undecided, so a copy is kept."""
        with self._lock:
            if self.copy is None and not self._gone:
                kept = self._view.read(self._view.empty()) if keep else None
                self.point = reached(self._view.device)
                self.copy, self._gone = kept, not keep


def flat_parts(flat: Tensor, size: int) -> Iterable[tuple[Tensor, slice]]:
    """A flat tensor in parts, and where each lies."""
    starts, parts = range(0, flat.numel(), size), torch.split(flat, size)
    return ((part, slice(start, start + part.numel())) for start, part in zip(starts, parts, strict=False))
