"""The sources of a loader's units: the job's ledger through the group, or `OwnUnits`."""

from __future__ import annotations

from typing import Protocol

from ftopt.sync.protocol.samples import Samples


class UnitSource(Protocol):
    """The units that this replica may use, in the order in which they are granted."""

    def take(self, timeout_s: float | None = None) -> int | None:
        """The next unit to load. Blocks while none is granted.

        None: the data have ended (`ended`), or no more are granted until the units taken are used: take the inner step,
        and try again.

        Raises:
            TimeoutError: none was granted within ``timeout_s``.
        """

    @property
    def ended(self) -> bool:
        """Whether every unit of the job is committed."""

    def draw(self, unit: int) -> bool:
        """Notes that the training loop gets this unit's batch, which the next inner step uses. Training thread, in
        order.

        False: the unit is no longer this replica's (which was declared gone), and its batch must not be used.
        """


class OwnUnits:
    """The units of a process without a group: all of them, in order."""

    def __init__(self, samples: Samples) -> None:
        self._end = samples.units
        self._next = 0
        self.position = 0
        """The first unit not drawn yet."""

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
        self._next = self.position = position
