"""The parameters of a contribution, as they were when it was frozen (FREEZE): a copy, or the parameters in place.

While the training thread waits for a round nothing changes the parameters, so the round is computed from them where
they are, and nobody needs a copy. Before the training thread goes on it calls `Frozen.thaw`.

On a GPU they may be still being computed, or copied, when the training thread hands them over: each reader's stream
waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ftopt.optimizer.tensors.flat import FlatView
from ftopt.streams import Point, finish, follow, reached


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a payload depends on that only the round tells; mostly it is what it was in the round before.

    Args:
        share: by which it is multiplied; None: by nothing.
        alone: as in `ftopt.methods.ReplicaView`.
        averages: as in `ftopt.methods.ReplicaView`.
    """

    share: float | None = None
    alone: bool = False
    averages: bool = False


class Frozen:
    """Frozen parameters. Any thread, but for `thaw`.

    Args:
        view: the parameters.
        copy: of them, flat fp32. None: they are read in place, until `thaw`.
    """

    def __init__(self, view: FlatView, copy: Tensor | None = None) -> None:
        self._view = view
        self._copy = copy
        self._gone = False
        self._lock = threading.Lock()
        self._ready: tuple[Assumed, Tensor] | None = None
        self._point = reached(view.device)

    @property
    def point(self) -> Point:
        """From there on they, and all that there was when they were frozen, are complete."""
        return self._point

    @property
    def copy(self) -> Tensor | None:
        """Flat fp32; None while they are in place."""
        return self._copy

    def flat(self) -> Tensor:
        """The copy; must be there."""
        assert self._copy is not None, "parameters that are frozen in place are read in parts"
        follow(self._view.device, self._point)
        return self._copy

    def offer(self, assumed: Assumed, payload: Tensor) -> None:
        """A payload that has been computed when they were frozen."""
        self._point = reached(self._view.device)
        self._ready = assumed, payload

    def take(self, assumed: Assumed) -> Tensor | None:
        """That payload, once, if it was computed for the same; what had no share yet gets it."""
        (found, payload), self._ready = self._ready or (None, None), None
        if payload is None or found is None or (found.alone, found.averages) != (assumed.alone, assumed.averages):
            return None
        if found.share == assumed.share:
            return payload
        return payload.mul_(assumed.share) if found.share is None and assumed.share is not None else None

    @contextmanager
    def parts(self, size: int) -> Iterator[Iterable[tuple[Tensor, slice]]]:
        """All of it in parts of at most ``size`` elements, and where each lies in a flat tensor. `thaw` waits.

        Raises:
            InterruptedError: the training thread has gone on: the round that this was for is over.
        """
        with self._lock:
            follow(self._view.device, self._point)
            if self._copy is not None:
                yield flat_parts(self._copy, size)
            elif self._gone:
                raise InterruptedError("the contribution is decided: its parameters have moved on")
            else:
                try:
                    yield self._view.parts(size)
                finally:
                    finish(self._view.device)

    def thaw(self, *, keep: bool) -> None:
        """The parameters are about to change. Training thread.

        Args:
            keep: the contribution is not decided: a copy stays.
        """
        with self._lock:
            if self._copy is None and not self._gone:
                kept = self._view.read(self._view.empty()) if keep else None
                self._point = reached(self._view.device)
                self._copy, self._gone = kept, not keep


def flat_parts(flat: Tensor, size: int) -> Iterable[tuple[Tensor, slice]]:
    """A flat tensor in parts, and where each lies."""
    starts, parts = range(0, flat.numel(), size), torch.split(flat, size)
    return ((part, slice(start, start + part.numel())) for start, part in zip(starts, parts, strict=False))
