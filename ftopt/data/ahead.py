"""Batches of granted units, loaded on the training thread or ahead of it by worker processes.

torch's loader asks its sampler for the next index whenever it returns a batch. But the next unit may be granted only
after that batch has been used (at the next outer step), so waiting for it would deadlock. `_Feed` therefore puts a
*blank* into the pipeline when no unit is granted and others are still being loaded; blanks are dropped at the other
end. It waits only when no unit is being loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset

from ftopt.data.batches import Batches
from ftopt.data.seeds import seed_of
from ftopt.data.states import StatefulDataset
from ftopt.data.units import UnitSource
from ftopt.data.workers import Pool, PoolSettings, as_it_is


class Here:
    """Loads each batch on the training thread, on demand."""

    def __init__(self, batches: Batches, units: UnitSource) -> None:
        self._batches = batches
        self._units = units
        self._unit: int | None = None

    def next(self) -> tuple[int, Any] | None:
        """A unit and its batch; None: see `UnitSource.take`. A unit that failed to load is loaded again."""
        if self._unit is None:
            self._unit = self._units.take()
        if self._unit is None:
            return None
        unit, batch = self._unit, self._batches[self._unit]
        self._unit = None
        return unit, batch

    def state(self) -> Any:
        """The data set's state; None if it has none."""
        return self._batches.dataset.state_dict() if isinstance(self._batches.dataset, StatefulDataset) else None

    def load(self, state: Any, *, forget: bool) -> None:
        """Gives the data set its ``state``; with ``forget``, drops a unit that was taken but not returned yet."""
        if forget:
            self._unit = None
        if state is not None:
            assert isinstance(self._batches.dataset, StatefulDataset)
            self._batches.dataset.load_state_dict(state)


class Ahead:
    """Loads in worker processes, at least one.

    ``seed`` is for torch's worker seeds; a unit's random numbers do not depend on it.
    """

    def __init__(self, batches: Batches, units: UnitSource, settings: PoolSettings, *, seed: int) -> None:
        self._stateful = isinstance(batches.dataset, StatefulDataset)
        self._batches = _StatefulOrBlank(batches) if self._stateful else _OrBlank(batches)
        self._settings = settings
        self._seed = seed_of("workers", seed)
        self._feed = _Feed(units)
        self._pool: Pool | None = None
        self._last: Any = None
        self._start()

    def next(self) -> tuple[int, Any] | None:
        """A unit and its batch; None: see `UnitSource.take`. After an error it goes on with the unit that failed."""
        if self._pool is None:
            self._start()
        assert self._pool is not None
        while True:
            try:
                batch = self._pool.next()
            except StopIteration:
                return None
            except BaseException:
                self._stop()
                raise
            unit = self._feed.out()
            if unit is not None:
                return unit, batch

    def state(self) -> Any:
        """The state of the data set's copies in the workers, None if they have none."""
        return self._pool.state() if self._pool is not None and self._stateful else self._last

    def load(self, state: Any, *, forget: bool) -> None:
        """Gives the data set's copies in the workers their ``state``, and loads the units in the pipeline again, or
        drops them with ``forget``."""
        self._stop()
        self._last = state
        if forget:
            self._feed.again.clear()
        self._start()

    def _start(self) -> None:
        self._feed.closed = True  # the first indices are blanks: this replica may not be connected yet
        self._pool = Pool(
            self._batches,
            self._settings,
            seed=self._seed,
            sampler=self._feed,
            collate=as_it_is,
            stateful=self._stateful,
            state=self._last,
        )
        self._feed.closed = False

    def _stop(self) -> None:
        if self._pool is not None:
            self._last = self.state()
            self._pool.close()
            self._pool = None
        self._feed.take_back()


class _Feed:
    """The workers' input in order: units, and blanks where none is granted."""

    def __init__(self, units: UnitSource) -> None:
        self._units = units
        self.again: deque[int] = deque()
        self._under_way: deque[int] = deque()
        self.closed = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        unit = self._unit()
        if unit is None:
            raise StopIteration
        self._under_way.append(unit)
        return unit

    def _unit(self) -> int | None:
        if self.closed:
            return _BLANK
        if self.again:
            return self.again.popleft()
        if all(unit == _BLANK for unit in self._under_way):
            return self._units.take()
        try:
            unit = self._units.take(0.0)
        except TimeoutError:
            return _BLANK
        return _BLANK if unit is None else unit  # more may be granted once the units under way are used

    def out(self) -> int | None:
        """Takes the oldest unit out of the pipeline; None: it was a blank."""
        unit = self._under_way.popleft()
        return None if unit == _BLANK else unit

    def take_back(self) -> None:
        """Loads the units under way again."""
        self.again.extendleft(unit for unit in reversed(self._under_way) if unit != _BLANK)
        self._under_way.clear()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the ledger decides which units come next. (Without it torchdata would skip units on resume.)"""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Does nothing."""


_BLANK = -1


class _OrBlank(Dataset[Any]):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, unit: int) -> Any:
        return None if unit == _BLANK else self._batches[unit]


class _StatefulOrBlank(_OrBlank):
    def state_dict(self) -> dict[str, Any]:
        assert isinstance(self._batches.dataset, StatefulDataset)
        return self._batches.dataset.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert isinstance(self._batches.dataset, StatefulDataset)
        self._batches.dataset.load_state_dict(state_dict)
