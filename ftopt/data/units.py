"""Where a loader gets its units from: the job's ledger through the group, or a count of its own.

`UnitSource` is what a loader asks of either; `Group` is what it asks of `ftopt.sync.group.ReplicaGroup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ftopt.data.shared import ShareSource
from ftopt.sync.protocol.samples import Samples


class UnitSource(Protocol):
    """The units that this replica may use, in the order in which they are granted."""

    def take(self, timeout_s: float | None = None) -> int | None:
        """The next one, for a loader that prefetches. Blocks while none is granted.

        None: the data have ended (`ended`); or there is nothing more for now while units that were taken wait for their
        inner step: take that step, and try again.

        Raises:
            TimeoutError: none was granted within ``timeout_s``.
        """

    @property
    def ended(self) -> bool:
        """Whether every unit of the job is done with."""

    def draw(self, unit: int) -> bool:
        """The training loop is given this unit's batch: the next inner step uses it. Training thread, in order.

        False: the unit is this replica's no more (it was declared gone meanwhile), and its batch must not be used.
        """


class SyncSettings(Protocol):
    """Of the job's settings."""

    @property
    def start_replicas(self) -> int | None:
        """Who is waited for before the start."""


class Group(Protocol):
    """A replica's membership in a job, as far as data are concerned."""

    replica: str

    @property
    def sync(self) -> SyncSettings:
        """The job's settings."""

    @property
    def incarnation(self) -> int:
        """0 before this replica has joined the job."""

    def keep_ledger(self, samples: Samples, *, accumulate: int = 1) -> UnitSource:
        """The job hands out these samples; called before the replica joins. Its units, ``accumulate`` an inner step.

        Raises:
            UserError: it has joined already, or hands out others.
        """

    def keep_global_batch(self, samples: Samples) -> ShareSource:
        """The job shares out these samples, a ``global_batch`` a step; as `keep_ledger`."""

    def emit(self, event: str, *, data: Mapping[str, Any] | None = None) -> None:
        """Tells an event in this replica's name."""


class OwnUnits:
    """The units of one process that shares them with nobody: all of them, one after the other.

    Args:
        samples: which there are.
    """

    def __init__(self, samples: Samples) -> None:
        self._end = samples.units
        self._next = 0
        self.position = 0
        """The first unit that is not drawn yet."""

    def take(self, timeout_s: float | None = None) -> int | None:
        """The next one; never blocks."""
        unit = self._next
        if self._end is not None and unit >= self._end:
            return None
        self._next += 1
        return unit

    @property
    def ended(self) -> bool:
        """Whether all are drawn."""
        return self.position == self._end

    def draw(self, unit: int) -> bool:
        """``unit`` is done with."""
        self.position = unit + 1
        return True

    def go_to(self, position: int) -> None:
        """Goes on with the unit ``position``."""
        self._next = self.position = position
