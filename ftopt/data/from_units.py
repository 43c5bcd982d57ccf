"""Batches of a data set with positions: one for each unit that the job's ledger grants, or for all the data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ftopt.data.ahead import Ahead, Here
from ftopt.data.batches import Batches
from ftopt.data.states import OTHER_DATA, StatefulDataset, check_same
from ftopt.data.units import OwnUnits, UnitSource
from ftopt.data.workers import PoolSettings
from ftopt.errors import UserError, check_part
from ftopt.sync.group import Island, ReplicaGroup
from ftopt.sync.protocol.samples import Samples


class FromUnits:
    """The source of a `DataLoader`'s batches for a data set with positions."""

    def __init__(
        self, batches: Batches, samples: Samples, units: UnitSource, group: ReplicaGroup | None, pool: PoolSettings
    ) -> None:
        self._samples = samples
        self._workers = pool.workers
        self._group = group
        self._units = units
        self._stateful = isinstance(batches.dataset, StatefulDataset)
        self._loading = Ahead(batches, units, pool, seed=samples.seed) if pool.workers else Here(batches, units)
        self._held: deque[tuple[int, Any]] = deque()  # given out, but not drawn yet
        self._again: deque[tuple[int, Any]] = deque()  # given out in a loop that ended before training on them
        self.ahead = self.epoch = 0

    def batches(self) -> Iterator[Any]:
        self._join()
        self._again.extendleft(reversed(self._held))
        self._held.clear()
        while (loaded := self._again.popleft() if self._again else self._loading.next()) is not None:
            self._held.append(loaded)
            if self._draw(self.ahead) or self.ahead:
                yield loaded[1]
        self._draw(0)

    @property
    def ended(self) -> bool:
        """Whether every sample of all epochs is in the job's model; without a group, whether it was given out."""
        return self._units.ended

    def _draw(self, ahead: int) -> bool:
        """All batches given out but the last ``ahead`` are trained on in the next step. False: the last one that is
        drawn is no longer this replica's."""
        drawn = False
        while len(self._held) > ahead:
            unit, _ = self._held.popleft()
            if drawn := self._units.draw(unit):
                self.epoch = self._samples.epoch_of(unit)
        return drawn

    def _join(self) -> None:
        group = self._group
        if group is None or group.incarnation:
            return
        if group.joins is None:
            raise UserError(
                "a batch was asked for, and no optimizer has been wrapped with this loader's group, which would join "
                "the job that hands the batches out; call ftopt.wrap(..., group=group) before the loop"
            )
        group.joins()

    def state_dict(self) -> dict[str, Any]:
        position = self._units.position if isinstance(self._units, OwnUnits) else None
        return {
            "units": {**asdict(self._samples), "position": position},
            "dataset": {"workers": self._workers, "state": self._loading.state()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        was = dict(state["units"])
        position = was.pop("position")
        check_same(asdict(self._samples), was, OTHER_DATA)
        if isinstance(self._units, OwnUnits) != (position is not None):
            raise UserError(
                "the state is of a loader without a group; the position of this one is its job's: resume the job"
                if position is not None
                else "the state is of a job, whose ledger has the position; this loader has no group; give it group="
            )
        workers, inner = state["dataset"]["workers"], state["dataset"]["state"]
        if inner is not None and workers != self._workers:
            raise UserError(
                f"num_workers={self._workers}, was {workers}: the data set keeps a state of its own in each worker, "
                f"which cannot be divided among another number of them; give num_workers={workers}"
            )
        if inner is not None and not self._stateful:
            raise UserError(
                "the state includes one of the data set, and this data set keeps none (state_dict, load_state_dict); "
                "give the data set that the state was taken with"
            )
        if isinstance(self._units, OwnUnits):
            self._units.go_to(position)
            self._held.clear()
            self._again.clear()
        self._loading.load(inner, forget=position is not None)


def units_of(group: ReplicaGroup | None, samples: Samples, accumulate: int) -> UnitSource:
    if group is None:
        return OwnUnits(samples)
    if group.island is None:
        return group.keep_ledger(samples, accumulate=accumulate)
    units = group.keep_ledger(samples, accumulate=accumulate) if group.island.leads else None
    return group.island.share_units(units)


def rank_share_of(given: tuple[int, int] | None, island: Island | None, samples: Samples) -> tuple[int, int]:
    """Which samples of each batch this process loads."""
    index, count = (0, 1) if island is None else (island.rank, island.size)
    if given is not None:
        index, count = check_part("rank_share", given, "this rank's share")
    last = samples.samples % samples.batch_size
    if samples.batch_size % count or (not samples.drop_last and last % count):
        short = "" if samples.batch_size % count else f", and the last batch of an epoch has {last}"
        raise UserError(
            f"batch_size={samples.batch_size} samples of a replica, for {count} shares{short}; shares must be equal, "
            f"since the gradient is their mean: give a multiple of {count}" + (" and drop_last=True" if short else "")
        )
    return index, count
