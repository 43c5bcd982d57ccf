"""The batch of a unit, the same in whichever process loads it.

Random numbers in a data set (augmentations) depend only on the seed and the unit: Python's, NumPy's and torch's
generators are seeded for each unit and restored afterwards. So a unit gives the same batch in any worker process of any
replica, also when it is computed again for a replica that died, and the training process's own random numbers (dropout)
do not depend on which process loads its data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from ftopt.data.order import Order
from ftopt.data.seeds import seed_of
from ftopt.sync.protocol.samples import Samples

Collate = Callable[[list[Any]], Any]


class MapStyle(Sized, Protocol):
    """A data set with positions: ``len(dataset)`` and ``dataset[index]``.

    ``__getitems__(indices)``, which returns a list, is used if it exists, as in torch. An attribute ``random = False``
    declares that the data set draws no random numbers, which saves 0.1 ms per unit.
    """

    def __getitem__(self, index: int) -> Any: ...


def samples_at(dataset: MapStyle, indices: list[int]) -> list[Any]:
    """The samples at these positions. RuntimeError: the data set raised StopIteration, which a loop over batches would
    mistake for the end of the data."""
    several = getattr(dataset, "__getitems__", None)
    try:
        return list(several(indices)) if several is not None else [dataset[index] for index in indices]
    except StopIteration as error:
        raise RuntimeError(
            f"the data set raised StopIteration for one of its samples {indices}, of {len(dataset)}: with positions "
            "it has no end but its length; give every sample up to there, or make the data set iterable"
        ) from error


class Batches(Dataset[Any]):
    """Unit -> batch. ``collate`` makes a batch from samples; default: torch's ``default_collate``. ``share``: (index,
    count) of this rank among the ranks that each load a share of every unit."""

    def __init__(
        self, dataset: MapStyle, samples: Samples, collate: Collate | None = None, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.dataset = dataset
        self._share = share
        self._samples = samples
        self._collate = collate or default_collate
        self._order = Order(samples.samples, seed=samples.seed)

    def __getitem__(self, unit: int) -> Any:
        with self._randomly(unit):
            return self._collate(self._samples_of(unit))

    def together(self, units: Sequence[int]) -> Any:
        """One batch with the samples of several units, each the same as in its own unit's batch."""
        if len(units) == 1:
            return self[units[0]]
        found: list[Any] = []
        for unit in units:
            with self._randomly(unit):
                found += self._samples_of(unit)
        with self._randomly(units[0]):
            return self._collate(found)

    def _samples_of(self, unit: int) -> list[Any]:
        samples = self._samples
        first, step = self._share
        indices = self._order.indices(samples.epoch_of(unit), samples.positions(unit)).tolist()[first::step]
        return samples_at(self.dataset, indices)

    def _randomly(self, unit: int) -> AbstractContextManager[None]:
        is_random = getattr(self.dataset, "random", True)
        rank = self._share[:1] if self._share[0] else ()
        return seeded(seed_of("unit", self._samples.seed, unit, *rank)) if is_random else nullcontext()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds all CPU generators that a data set may draw from, and restores them after the block."""
    python, numpy, generator = random.getstate(), np.random.get_state(), torch.default_generator
    state = generator.get_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        generator.set_state(state)
