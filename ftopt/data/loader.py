"""DataLoader: batches of a job's samples, each sample in one batch of one replica.

The job's ledger grants *units*, each one batch, to replicas. `DataLoader` takes them through the replica's group, maps
each to samples by the job's order (`ftopt.data.order`) and loads them, ahead of time if it has worker processes. A unit
counts as used once the training loop has got its batch and taken an inner step. If this replica is gone before that,
the unit is granted to another replica. With several fragments the first one decides whether a unit is used: see
``docs/data.md``.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeGuard, TypeVar, cast

from torch.utils.data import IterableDataset

from ftopt.data.batches import Batches, MapStyle
from ftopt.data.from_units import FromUnits, rank_share_of, units_of
from ftopt.data.shared import FromShares
from ftopt.data.streams import Stream, StreamSettings
from ftopt.data.workers import PoolSettings
from ftopt.errors import UserError, check_bool, check_choice, check_part, check_whole, names_arguments, plain_number
from ftopt.sync.group import ReplicaGroup
from ftopt.sync.protocol.samples import Samples

T = TypeVar("T")

_log = logging.getLogger(__name__)


class DataLoader:
    """Iterates over this replica's batches, through all epochs, until the data end.

        loader = ftopt.DataLoader(dataset, batch_size=16, group=group, seed=0, epochs=3, num_workers=2)
        with optimizer:
            for inputs, targets in loader:
                loss(model(inputs), targets).backward()
                optimizer.step(); optimizer.zero_grad()

    Make the loader before the replica joins (``with optimizer:``); its first batch joins the job unless it has been
    joined. An inner step uses every batch drawn since the step before. Leaving the loop and iterating again goes on
    with the next batch: there is one pass over all epochs. When the data have ended, further loops get nothing, and the
    log says so.

    Random numbers in the data set depend only on the seed and the unit, not on the loading process
    (`ftopt.data.batches`).

    An iterable data set has no positions: each replica reads all of it and keeps its shard of the samples. A warning
    and the event ``sharded`` say so once; the guarantees of ``docs/data.md`` do not hold then.

    Args:
        dataset: with positions (``len(dataset)`` and ``dataset[index]``; ``dataset.__getitems__(indices)`` is used if
            it exists), or iterable.
        batch_size: samples in a batch. Default 1.
        group: the optimizer's group. None: this process gets all the data.
        seed: the seed of the order, the same in all replicas. Default 0.
        epochs: number of epochs. Default 1; None: unlimited.
        drop_last: whether a short last batch of an epoch is left out. Default False.
        accumulate: batches (micro-batches) per inner step, for `steps`. Default 1.
        num_workers: processes that load ahead; they start here. Default 0: batches are loaded on the training thread.
        prefetch_factor: batches that each worker loads ahead. Default 2.
        collate_fn: makes a batch of a list of samples. Default torch's ``default_collate``.
        pin_memory: page-locked batches; needs ``num_workers``. Default False.
        multiprocessing_context: ``fork``, ``spawn`` or ``forkserver``; default Python's. Give ``forkserver`` if this
            process has threads already.
        global_batch: number of samples in one step over all replicas, for `ftopt.SyncSGD` and `ftopt.PAFT`: see
            `global_batches`. A multiple of ``batch_size``, or of ``split``. Needs a group, and a data set with
            positions. Default None.
        split: number of samples of a global batch that stay together when it is divided: the micro-batch of a replica
            that dies can then be divided among several others. Divides ``batch_size``. Default None: a micro-batch
            stays whole.
        shard: (this replica's shard, number of shards) of an iterable data set. Default: the number at the end of the
            replica's id, and ``policy.start_replicas``; no default in a replica of several ranks.
        rank_share: in a replica of several ranks, (this rank's share, number of shares) of the samples of each batch.
            Ranks that need the same samples (tensor parallel) get the same share. ``batch_size`` is the whole
            replica's, a multiple of the number of shares. Default: a share for each rank.

    Raises:
        UserError: an argument is out of range, or does not apply to this kind of data set.
    """

    @names_arguments("ftopt.DataLoader(dataset, batch_size=16, group=group, seed=0), which draws the order itself")
    def __init__(
        self,
        dataset: MapStyle | Iterable[Any],
        batch_size: int = 1,
        *,
        group: ReplicaGroup | None = None,
        seed: int = 0,
        epochs: int | None = 1,
        drop_last: bool = False,
        accumulate: int = 1,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
        global_batch: int | None = None,
        split: int | None = None,
        shard: tuple[int, int] | None = None,
        rank_share: tuple[int, int] | None = None,
    ) -> None:
        batch_size, accumulate, num_workers, prefetch_factor, seed, epochs, global_batch, split = plain_number(
            (batch_size, accumulate, num_workers, prefetch_factor, seed, epochs, global_batch, split)
        )
        counts = ("accumulate", accumulate, 1), ("num_workers", num_workers, 0), ("prefetch_factor", prefetch_factor, 1)
        for name, value, low in (*counts, ("batch_size", batch_size, 1), ("seed", seed, 0)):
            check_whole(name, value, low)
        for name, optional in (("epochs", epochs), ("global_batch", global_batch), ("split", split)):
            if optional is not None:
                check_whole(name, optional, 1)
        drop_last, pin_memory = check_bool("drop_last", drop_last), check_bool("pin_memory", pin_memory)
        check_choice("multiprocessing_context", multiprocessing_context, (None, "fork", "spawn", "forkserver"))
        if collate_fn is not None and not callable(collate_fn):
            raise UserError(f"collate_fn={collate_fn!r:.60}; must be a function of a list of samples, or None")
        if not isinstance(dataset, Iterable) and not _has_positions(dataset):
            raise UserError(
                f"dataset is a {type(dataset).__name__}; must have positions (len(dataset) and dataset[index]) or be "
                "iterable"
            )
        if group is not None and not isinstance(getattr(group, "replica", None), str):
            raise UserError(f"group={group!r:.60}; must be the optimizer's group, or None")
        if pin_memory and not num_workers:
            raise UserError("pin_memory=True needs worker processes; give num_workers=1 or more")
        if split is not None and (global_batch is None or batch_size % split):
            raise UserError(
                f"split={split} with batch_size={batch_size}, global_batch={global_batch}; it divides the "
                "micro-batches of a global batch: give one, and a split that divides batch_size, or leave it out"
            )
        if global_batch is not None and accumulate != 1:
            raise UserError(
                f"accumulate={accumulate} with global_batch={global_batch}, which says how many samples a step has; "
                "leave accumulate out"
            )
        self._accumulate = accumulate
        self._replica = None if group is None else group.replica
        self._used_up = False
        self._told = group is not None and group.island is not None and not group.island.leads  # rank 0 reports it
        pool = PoolSettings(
            workers=num_workers, prefetch_factor=prefetch_factor, pin_memory=pin_memory, context=multiprocessing_context
        )
        self._source: FromUnits | Stream | FromShares
        if global_batch is not None:
            if group is not None and group.island is not None:
                raise UserError(
                    f"global_batch={global_batch} in a replica of several ranks is not supported; leave it out: each "
                    "inner step of ftopt.SyncSGD is the mean over the replicas' batches anyhow"
                )
            if group is None or not _has_positions(dataset):
                raise UserError(
                    f"global_batch={global_batch} needs a group, which shares it out, and a data set with positions "
                    "(len(dataset) and dataset[index]), since what one replica cannot finish another one computes; "
                    "give group=, and micro-batches of your own by their index (docs/data.md)"
                )
            unit = batch_size if split is None else split
            samples = _samples(len(dataset), unit, seed, epochs, drop_last=drop_last, global_batch=global_batch)
            share = group.keep_global_batch(samples, at_once=batch_size // unit)
            self._source = FromShares(Batches(dataset, samples, collate_fn), samples, share, pool)
        elif _has_positions(dataset):
            if shard is not None:
                raise UserError(
                    f"shard={shard} with a data set that has positions; leave it out: the job's ledger divides the "
                    "samples"
                )
            samples = _samples(len(dataset), batch_size, seed, epochs, drop_last=drop_last)
            island = group.island if group is not None else None
            part, units = rank_share_of(rank_share, island, samples), units_of(group, samples, accumulate)
            self._source = FromUnits(Batches(dataset, samples, collate_fn, part), samples, units, group, pool)
        else:
            found = _shard_of(group) if shard is None else shard
            index, count = check_part("shard", found, "this replica's number")
            if group is not None:
                _tell_sharded(group, index, count)
            settings = StreamSettings(
                batch_size=batch_size,
                drop_last=drop_last,
                shard=index,
                shards=count,
                workers=num_workers,
                epochs=epochs,
                seed=seed,
            )
            stream = cast(Iterable[Any], dataset)
            self._source = Stream(stream, settings, pool, collate=collate_fn)

    @property
    def ended(self) -> bool:
        """Whether the data of all epochs have ended, so that further loops get nothing: for trainers, which would begin
        epoch after epoch."""
        return self._source.ended

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, from 0."""
        return self._source.epoch

    def asked_ahead(self, batches: int) -> None:
        """The number of batches that the trainer fetches before it trains on them, set by its callback. A batch that
        the trainer leaves unused comes again in the next loop."""
        if isinstance(self._source, FromUnits):
            self._source.ahead = batches

    @property
    def dataset(self) -> Any:
        """The data set. Not for trainers that would make their own loader from it and draw samples by themselves."""
        raise AttributeError(
            "an ftopt.DataLoader shows no `dataset`: the job hands its batches out, so that it cannot be made anew, "
            "skipped through or divided (Accelerate's prepare_data_loader and skip_first_batches, Fabric's "
            "setup_dataloaders); iterate over it as it is (docs/trainers.md)"
        )

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._source, FromShares):
            self._source.refuse()
        return self._loop(self._source.batches())

    def steps(self) -> Iterator[list[Any]]:
        """The batches of each inner step in turn, ``accumulate`` of them; fewer at the end of the data.

            for micro_batches in loader.steps():
                for inputs, targets in micro_batches:
                    (loss(model(inputs), targets) / len(micro_batches)).backward()
                optimizer.step(); optimizer.zero_grad()

        Prefer this to counting in the loop: near the end of the data fewer may be left, and no more come until they are
        used.
        """
        if isinstance(self._source, FromShares):
            self._source.refuse()
        return self._loop(self._steps())

    def _steps(self) -> Iterator[list[Any]]:
        while batches := list(islice(self._source.batches(), self._accumulate)):
            yield batches

    def _loop(self, batches: Iterator[T]) -> Iterator[T]:
        """One loop of the caller. A loop that begins after the data have ended gets nothing, and the log says so once,
        since it may be meant as the next epoch."""
        if self._used_up and not self._told:
            self._told = True
            _log.warning(
                "%s: a loop over the loader begins when its data have ended, and gets no batch: the loop before went "
                "through all epochs; give ftopt.DataLoader(..., epochs=N), or epochs=None for a loop that ends by its "
                "steps",
                "this process" if self._replica is None else f"replica {self._replica}",
            )
        yield from batches
        self._used_up = self._source.ended

    def global_batches(self) -> Iterator[Iterator[Any]]:
        """This replica's micro-batches of each global batch in turn, until the data have ended.

            for micro_batches in loader.global_batches():
                for inputs, targets in micro_batches:
                    loss(model(inputs), targets).backward()  # the mean over the micro-batch
                optimizer.step()

        The step's gradient is the mean over the samples of the global batch, whichever replicas computed them. When a
        replica fails, its micro-batches are given to the others, which keep their own; the inner loop ends when the
        global batch is complete. Gradients are removed after each micro-batch: clip with ``SyncSGD(clip_norm=)``.

        Raises:
            UserError: the loader has no ``global_batch``.
        """
        if not isinstance(self._source, FromShares):
            raise UserError("global_batches() of a loader without a global batch; give it global_batch=")
        return self._loop(self._source.global_batches())

    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` needs to go on after the last batch.

        In a job the ledger keeps the position, in the job's checkpoints. This state then has the settings, for
        comparison, and the data set's own state if it has one (``state_dict``, ``load_state_dict``).
        """
        return self._source.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned, with any number of workers and replicas if the data set has
        positions.

        Raises:
            UserError: the state is of other data or settings, or cannot be divided among another number of workers or
                shards. Nothing is changed.
        """
        kind = {FromUnits: "units", Stream: "stream", FromShares: "shares"}[type(self._source)]
        if kind not in state_dict:
            found = ", ".join(map(str, state_dict)) or "nothing"
            raise UserError(
                f"the state holds {found}; this loader's data set needs {kind}; load the state of a loader with the "
                "same kind of data set"
            )
        self._source.load_state_dict(state_dict)
        self._used_up = False


def _samples(count: int, batch_size: int, seed: int, epochs: int | None, **more: Any) -> Samples:
    if not count:
        raise UserError("the data set is empty; give one with samples")
    return Samples(samples=count, batch_size=batch_size, seed=seed, epochs=epochs, **more)


def _has_positions(dataset: Any) -> TypeGuard[MapStyle]:
    """Whether it is map-style; torch's ``IterableDataset`` inherits a ``__getitem__`` that only raises."""
    named = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return named and not isinstance(dataset, IterableDataset)


def _shard_of(group: ReplicaGroup | None) -> tuple[int, int]:
    if group is None:
        return 0, 1
    if group.island is not None:
        raise UserError(
            "an iterable data set in a replica of several ranks: which shard is this rank's? Give shard=(its number "
            "among all ranks of all replicas, how many they are)"
        )
    number, count = re.search(r"\d+$", group.replica), group.policy.start_replicas
    if number is None or count is None or int(number.group()) >= count:
        raise UserError(
            f"replica {group.replica!r} with policy.start_replicas={count} does not tell which shard of an iterable "
            "data set is its own; give shard=(this replica's number, from 0 on, and the number of replicas)"
        )
    return int(number.group()), count


def _tell_sharded(group: ReplicaGroup, index: int, count: int) -> None:
    text = (
        f"the data set is iterable and has no positions, so this replica reads all of it and keeps shard {index} of "
        f"{count}; the job does not account for its samples: those of a dead replica are missing from this epoch"
    )
    warnings.warn(text, stacklevel=4)
    group.emit("sharded", data={"shard": index, "shards": count, "text": text})
