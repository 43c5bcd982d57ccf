"""Batches of samples drawn with replacement by a seeded generator, without end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftopt.data.corpus import Bytes, check_length


class Draws:
    """An endless stream of batches.

    Args:
        places: number of places to draw from.
        load: places, (batch_size,), int64 -> a batch.
        share: this rank's number, and the number of ranks that divide each batch. All of them draw the same places, so
            that they share one state. Default: all of it.
    """

    def __init__(
        self,
        places: int,
        load: Callable[[Tensor], Any],
        *,
        batch_size: int,
        seed: int,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._places = places
        self._load = load
        self._batch_size = batch_size
        self._rank, self._ranks = share
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self) -> Any:
        places = torch.randint(self._places, (self._batch_size,), generator=self._generator)
        return self._load(places[self._rank :: self._ranks])

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self._generator.set_state(state_dict["generator"])


def windows(data: Bytes, context: int, *, batch_size: int, seed: int, share: tuple[int, int] = (0, 1)) -> Draws:
    """Windows of ``context`` bytes at random positions, and the bytes that follow each: (batch_size, context), int64.
    UserError: ``data`` (uint8, 1-D) is shorter than one window."""
    check_length(data, context)
    text = torch.from_numpy(data) if data.flags.writeable else torch.tensor(data)
    offsets = torch.arange(context + 1)

    def load(starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = text[starts[:, None] + offsets].long()
        return rows[:, :-1], rows[:, 1:]

    return Draws(data.size - context, load, batch_size=batch_size, seed=seed, share=share)
