"""Where a loader gets its units from: the job's ledger through the group, or `OwnUnits`.

`UnitSource` is the interface of both; `Group` is the part of `ftopt.sync.group.ReplicaGroup` that a loader uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ftopt.data.shared import ShareSource
from ftopt.sync.protocol.samples import Samples


class UnitSource(Protocol):
    """The units that this replica may use, in the order in which they are granted."""

    def take(self, timeout_s: float | None = None) -> int | None:
        """The next unit to load. Blocks while none is granted.

        None: the data have ended (`ended`), or no more are granted until the units that were taken are used: take the
        inner step, and try again.

        Raises:
            TimeoutError: none was granted within ``timeout_s``.
        """

    @property
    def ended(self) -> bool:
        """Whether every unit of the job is committed."""

    def draw(self, unit: int) -> bool:
        """The training loop gets this unit's batch, and the next inner step uses it. Training thread, in order.

        False: the unit is no longer this replica's (it was declared gone meanwhile), and its batch must not be used.
        """


class SyncSettings(Protocol):
    """The job's settings, as far as data are concerned."""

    @property
    def start_replicas(self) -> int | None:
        """How many replicas the start waits for."""


class RankIsland(Protocol):
    """The ranks of a replica, as far as data are concerned."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""

    def share_units(self, units: Any) -> UnitSource:
        """The replica's units, as all ranks have them; ``units``: on rank 0."""


class Group(Protocol):
    """A replica's membership in a job, as far as data are concerned."""

    replica: str

    @property
    def island(self) -> RankIsland | None:
        """Its ranks; None: one process."""

    @property
    def sync(self) -> SyncSettings:
        """The job's settings."""

    @property
    def incarnation(self) -> int:
        """0 before this replica has joined the job."""

    @property
    def joins(self) -> Callable[[], object] | None:
        """What makes it join; None: no optimizer has been wrapped with this group yet."""

    def keep_ledger(self, samples: Samples, *, accumulate: int = 1) -> UnitSource:
        """Declares the job's samples, before the replica joins; returns its units, ``accumulate`` per inner step.

        Raises:
            UserError: the replica has joined already, or the job hands out other samples.
        """

    def keep_global_batch(self, samples: Samples, *, at_once: int = 1) -> ShareSource:
        """As `keep_ledger`, for samples that the replicas share, a ``global_batch`` per step; a replica computes so
        many units ``at_once``, at most."""

    def emit(self, event: str, *, data: Mapping[str, Any] | None = None) -> None:
        """Emits an event of this replica."""


class OwnUnits:
    """The units of a process without a group: all of them, in order."""

    def __init__(self, samples: Samples) -> None:
        self._end = samples.units
        self._next = 0
        self.position = 0
        """The first unit that is not drawn yet."""

    def take(self, timeout_s: float | None = None) -> int | None:
        if self._next == self._end:
            return None
        self._next += 1
        return self._next - 1

    @property
    def ended(self) -> bool:
        return self.position == self._end

    def draw(self, unit: int) -> bool:
        self.position = unit + 1
        return True

    def go_to(self, position: int) -> None:
        """Goes on with unit ``position``."""
        self._next = self.position = position
