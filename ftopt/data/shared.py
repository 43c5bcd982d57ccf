"""Micro-batches of a global batch that the replicas of a job share, loaded on the training thread or ahead of it.

A replica's share is known only for the batch under way. For later batches the worker processes assume that shares do
not change, which is usually right. Units that go to another replica are loaded for nothing; inherited units that were
not expected are loaded on the training thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from torch.utils.data import Dataset

from ftopt.data.batches import Batches
from ftopt.data.seeds import seed_of
from ftopt.data.states import OTHER_DATA, check_same
from ftopt.data.workers import Pool, PoolSettings, as_it_is
from ftopt.errors import UserError
from ftopt.sync.group import GlobalBatch, Ranges
from ftopt.sync.protocol.samples import Samples

_BLANK: tuple[int, ...] = ()
"""Fills the workers' pipeline when no unit is to be loaded."""


class FromShares:
    """The source of the batches of a `DataLoader` with a ``global_batch``."""

    def __init__(self, batches: Batches, samples: Samples, share: GlobalBatch, pool: PoolSettings) -> None:
        self._batches = batches
        self._ahead = SharesAhead(batches, samples, share, pool) if pool.workers else None
        self._samples = samples
        self._share = share
        self.epoch = 0

    def refuse(self) -> None:
        raise UserError(
            "the loader has a global batch, so it cannot be iterated over directly; use `for micro_batches in "
            "loader.global_batches()`, with a loop over each of them inside"
        )

    @property
    def ended(self) -> bool:
        """Whether all epochs are in the job's model."""
        return self._share.ended

    def batches(self) -> Iterator[Any]:
        """The micro-batches of the next global batch."""
        share = self._share
        while (units := share.next()) is not None:
            try:
                ahead = self._ahead
                batch = self._batches.together(_each(units)) if ahead is None else ahead.load(units)
            except BaseException:
                share.put_back()
                raise
            self.epoch = self._samples.epoch_of(units[0][0])
            yield batch

    def global_batches(self) -> Iterator[Iterator[Any]]:
        while self._share.more():
            yield self.batches()

    def state_dict(self) -> dict[str, Any]:
        return {"shares": asdict(self._samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same(asdict(self._samples), state["shares"], OTHER_DATA)


class ToCome:
    """The micro-batches that this replica is expected to compute: those of the batch under way, and of the next
    ``versions`` batches if shares do not change."""

    def __init__(self, samples: Samples, share: GlobalBatch, *, versions: int) -> None:
        assert samples.global_batch is not None
        self._shift, self._end = samples.global_batch // samples.batch_size, samples.units
        self._share, self._versions = share, versions

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        left, share = self._share.expected()
        yield from self._micro_batches(_each(left))
        for ahead in range(1, 1 + self._versions if share else 1):
            units = [unit + ahead * self._shift for unit in _each(share)]
            yield from self._micro_batches([unit for unit in units if self._end is None or unit < self._end])

    def _micro_batches(self, units: list[int]) -> Iterator[tuple[int, ...]]:
        for at in range(0, len(units), self._share.at_once):
            yield tuple(units[at : at + self._share.at_once])


class SharesAhead:
    """Loads in worker processes, at least one."""

    def __init__(self, batches: Batches, samples: Samples, share: GlobalBatch, settings: PoolSettings) -> None:
        assert samples.global_batch is not None
        self._batches, self._settings = batches, settings
        self._seed = seed_of("workers", samples.seed)
        self._to_come = ToCome(samples, share, versions=1 + settings.workers * settings.prefetch_factor)
        self._under_way: deque[tuple[int, ...]] = deque()
        """In the workers' pipeline, in order."""
        self._loaded: dict[tuple[int, ...], Any] = {}
        """Out of the pipeline, but not requested yet."""
        self._pool: Pool | None = self._start()

    def load(self, units: Ranges) -> Any:
        """The micro-batch of these units. Raises the data set's errors, and `WorkerDied`, after which it can be called
        again."""
        wanted = tuple(_each(units))
        if self._pool is None:
            self._pool = self._start()
        try:
            while wanted not in self._loaded:
                if wanted not in self._under_way and _BLANK not in self._under_way:
                    return self._batches.together(wanted)
                batch = self._pool.next()
                if loaded := self._under_way.popleft():
                    self._loaded[loaded] = batch
        except BaseException:
            self._pool.close()
            self._pool = None
            self._under_way.clear()
            raise
        batch = self._loaded.pop(wanted)
        to_come = set(self._to_come)
        self._loaded = {each: batch for each, batch in self._loaded.items() if each in to_come}
        return batch

    def _start(self) -> Pool:
        dataset = _TogetherOrBlank(self._batches)
        feed = iter(self._next_to_load, None)  # without end
        return Pool(dataset, self._settings, seed=self._seed, sampler=feed, collate=as_it_is, stateful=False)

    def _next_to_load(self) -> tuple[int, ...]:
        known = {*self._under_way, *self._loaded}
        found = next((each for each in self._to_come if each not in known), _BLANK)
        self._under_way.append(found)
        return found


class _TogetherOrBlank(Dataset[Any]):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, units: tuple[int, ...]) -> Any:
        return self._batches.together(units) if units else None


def _each(units: Ranges) -> list[int]:
    return [unit for start, stop in units for unit in range(start, stop)]
