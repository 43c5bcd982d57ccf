"""A modelled loader: what ``ftopt.sync.replica.units`` does, without threads, and batches that are taken ahead."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from ftopt.sync.protocol.intervals import Ranges, union
from ftopt.sync.protocol.ledger.unit_queue import UnitQueue
from ftopt.sync.protocol.replica.effects import ReplicaEffect
from ftopt.sync.protocol.replica.machine import Replica
from tests.simulation.knobs import Knobs


class Loader:
    """Of one life of a process: its queue of units, and the batches that are on their way to the training loop.

    ``act`` does what ``machine`` asks.
    """

    def __init__(
        self, machine: Replica, knobs: Knobs, coverage: Counter[str], act: Callable[[list[ReplicaEffect]], None]
    ) -> None:
        assert knobs.samples is not None
        self.unit_queue = UnitQueue()
        self.ended = False
        self._machine = machine
        self._coverage = coverage
        self._act = act
        self._total = knobs.samples.units
        self._accumulate, self._capacity = knobs.accumulate, knobs.accumulate + knobs.ahead
        self._ahead: deque[int] = deque()
        self._out_of_units = False
        self.used_by: dict[int, list[int]] = {}
        """Inner step of this life -> the units that it has used."""
        self.inherited: Ranges = ()
        """Units used by steps of replicas that have not come back."""
        machine.lease.wants = 3 * knobs.sync_every * knobs.accumulate + knobs.ahead

    @property
    def waits(self) -> bool:
        """Whether there is nothing to train on, and no more for now."""
        return (self._out_of_units or self.ended) and not self.unit_queue.queued and not self._ahead

    def draw(self, step: int) -> bool:
        """The units of an inner step of that number; at the end of the data fewer than usual. False: there is none."""
        while len(self._ahead) < self._capacity and (unit := self.unit_queue.take()) is not None:
            self._ahead.append(unit)
        if self.unit_queue.queued <= self._machine.lease.wants // 6 and not (self._out_of_units or self.ended):
            self._act(self._machine.ask())
        if len(self._ahead) < self._accumulate and not self._out_of_units:
            return False
        drawn: list[int] = []
        while self._ahead and len(drawn) < self._accumulate:
            unit = self._ahead.popleft()
            if self.unit_queue.draw(unit):
                drawn.append(unit)
        self.unit_queue.use()
        self.used_by[step] = drawn
        return bool(drawn)

    def used(self, start: int, stop: int) -> Ranges:
        """By the inner steps ``start + 1 .. stop``."""
        return union((unit, unit + 1) for step in range(start + 1, stop + 1) for unit in self.used_by.get(step, ()))

    def grant(self, ranges: Ranges, *, out_of_units: bool) -> None:
        """More units, or the answer that there are none."""
        self.unit_queue.grant(ranges)
        if out_of_units:
            self._coverage["no units for now"] += 1
        self._out_of_units = out_of_units and not ranges

    def settle(self, done: Ranges, own: Ranges) -> Ranges:
        """These are in the committed state; see `UnitQueue.settle`."""
        twice = self.unit_queue.settle(done, own)
        self.ended = self._total is not None and done == ((0, self._total),)
        return twice

    def reset(self) -> None:
        """The incarnation is gone; batches that were taken ahead are drawn in vain."""
        self.unit_queue.reset()
        self._out_of_units = self.ended = False

    def put_back(self, used: Ranges, queue: Ranges, steps: dict[int, list[int]], inherited: Ranges) -> None:
        """Goes on with what a checkpoint has kept, and with what steps of others have used."""
        self.unit_queue.put_back(used, queue)
        self.used_by, self.inherited = dict(steps), inherited
