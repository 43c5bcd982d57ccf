"""The batch of a unit, the same wherever it is loaded.

Random numbers in a data set (augmentations) depend only on the seed and the unit: Python's, NumPy's and torch's
generators are seeded for each unit and restored afterwards. So a unit gives the same batch in any worker process of any
replica, also when it is computed again for a replica that died, and the training process' own random numbers (dropout)
do not depend on who loads its data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, nullcontext
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


class Batches(Dataset[Any]):
    """Unit -> batch. ``collate`` makes it of its samples; default: torch's ``default_collate``."""

    def __init__(self, dataset: MapStyle, samples: Samples, collate: Collate | None = None) -> None:
        self.dataset = dataset
        self._samples = samples
        self._collate = collate or default_collate
        self._order = Order(samples.samples, seed=samples.seed)

    def __getitem__(self, unit: int) -> Any:
        order, samples = self._order, self._samples
        indices = order.indices(samples.epoch_of(unit), samples.positions(unit)).tolist()
        is_random = getattr(self.dataset, "random", True)
        with _seeded(seed_of("unit", samples.seed, unit)) if is_random else nullcontext():
            several = getattr(self.dataset, "__getitems__", None)
            found = several(indices) if several is not None else [self.dataset[index] for index in indices]
            return self._collate(found)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
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
