"""Iterable data sets, whose samples have no positions that a ledger could account for.

Each replica reads the whole stream and keeps every n-th sample, its *shard*. The rest of a shard is lost when its
replica dies. A data set that splits itself among the worker processes of a loader, as torch recommends, is split
further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from ftopt.data.seeds import seed_of
from ftopt.data.states import StatefulDataset, check_same
from ftopt.data.workers import Pool, PoolSettings
from ftopt.errors import UserError


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """The settings of `DataLoader` that must be unchanged for a stream to go on from its state."""

    batch_size: int
    drop_last: bool
    shard: int
    shards: int
    workers: int
    epochs: int | None
    seed: int


class Stream:
    """One replica's batches of a stream: the source of a `DataLoader`'s batches for an iterable data set.

    ``dataset`` is the whole stream; ``collate`` None is torch's default.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        settings: StreamSettings,
        pool: PoolSettings,
        *,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._dataset = _Shard(dataset, settings.shard, settings.shards)
        self.settings = settings
        self._pool_settings = pool
        self._collate = collate
        self._state: Any = None
        self._empty = True
        self.epoch = 0
        self._pool: Pool | None = self._new_pool()

    def batches(self) -> Iterator[Any]:
        """The remaining batches, through all epochs. ftopt.data.workers.WorkerDied: iterate again to go on after the
        last batch, with new workers."""
        while not self.ended:
            if self._pool is None:
                self._pool = self._new_pool()
            try:
                batch = self._pool.next()
            except StopIteration:
                if self._empty:
                    raise UserError(
                        f"shard {self.settings.shard} of {self.settings.shards} of the data set gave no batch in "
                        f"epoch {self.epoch}; use fewer shards, a smaller batch_size, or data that can be read again"
                    ) from None
                self.epoch += 1
                self._empty = True
            except BaseException:
                self._stop()
                raise
            else:
                self._empty = False
                yield batch

    @property
    def ended(self) -> bool:
        """Whether all epochs are used up."""
        return self.epoch == self.settings.epochs

    def state_dict(self) -> dict[str, Any]:
        """The settings, the epoch, and the state of the data set."""
        state = self._pool.state() if self._pool is not None else self._state
        return {"stream": asdict(self.settings), "epoch": self.epoch, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned. UserError: the state was taken with other settings."""
        why = (
            "the state of a data set without positions fits the same settings only; give them as they were, or a "
            "map-style data set, which goes on with any number of workers and replicas"
        )
        check_same(asdict(self.settings), state["stream"], why)
        self.epoch = int(state["epoch"])
        self._empty = False
        self._stop()
        self._state = state["state"]
        self._pool = self._new_pool()

    def _stop(self) -> None:
        if self._pool is not None:
            self._state = self._pool.state()
            self._pool.close()
            self._pool = None

    def _new_pool(self) -> Pool:
        settings = self.settings
        return Pool(
            self._dataset,
            self._pool_settings,
            seed=seed_of("stream", settings.seed, settings.shard),
            batch_size=settings.batch_size,
            drop_last=settings.drop_last,
            collate=self._collate,
            state=self._state,
        )


class _Shard(IterableDataset[Any]):
    """Every ``shards``-th sample, starting with number ``shard``."""

    def __init__(self, dataset: Iterable[Any], shard: int, shards: int) -> None:
        self.dataset = dataset
        self.shard = shard
        self.shards = shards

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        if isinstance(self.dataset, StatefulDataset) or isinstance(samples, StatefulDataset):
            return _StatefulSamples(self, samples)
        return islice(samples, self.shard, None, self.shards)


class _StatefulSamples:
    """Samples of a data set or iterator with a state of its own; without one, torchdata reads up to the position."""

    def __init__(self, shard: _Shard, samples: Iterator[Any]) -> None:
        self._shard = shard
        self._samples = samples
        self._skip = shard.shard
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            sample = next(islice(self._samples, self._skip, None))
        except StopIteration:
            self._ended = True
            raise
        self._skip = self._shard.shards - 1
        return sample

    def state_dict(self) -> dict[str, Any]:
        dataset = self._shard.dataset
        samples = None if self._samples is dataset else self._samples
        return {
            "skip": self._skip,
            "ended": self._ended,
            "dataset": dataset.state_dict() if isinstance(dataset, StatefulDataset) else None,
            "samples": samples.state_dict() if isinstance(samples, StatefulDataset) else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dataset = self._shard.dataset
        if isinstance(dataset, StatefulDataset):
            dataset.load_state_dict(state_dict["dataset"])
        self._samples = iter(dataset)
        if state_dict["samples"] is not None and isinstance(self._samples, StatefulDataset):
            self._samples.load_state_dict(state_dict["samples"])
        self._skip, self._ended = state_dict["skip"], state_dict["ended"]
