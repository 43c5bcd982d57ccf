"""A replica's side of the sample ledger: its granted units, from the grant to the commit.

    queued  --take-->  taken  --draw-->  drawn  --use-->  used  --offer: in a contribution-->  done

A loader *takes* units ahead (QUEUE: in the order of the grants); the training loop *draws* their batches; an inner step
*uses* all drawn units. A contribution carries all units that were used and are not done yet.
"""

from __future__ import annotations

from collections import deque

from ftopt.sync.protocol.intervals import Range, Ranges, contains, intersect, size, subtract, union


class UnitQueue:
    """The units of one replica's process, whatever its incarnation. Not thread-safe."""

    def __init__(self) -> None:
        self._queue: deque[Range] = deque()
        self._taken: set[int] = set()
        self._drawn: list[int] = []
        self._used: Ranges = ()
        self._redone: Ranges = ()
        self._last: list[int] = []

    @property
    def queued(self) -> int:
        return size(self._queue)

    @property
    def unused(self) -> int:
        """The number of units that are taken or drawn, but not used by a step yet."""
        return len(self._taken) + len(self._drawn)

    def grant(self, ranges: Ranges) -> None:
        self._queue.extend(ranges)

    def grant_first(self, ranges: Ranges) -> None:
        """Queues units before all others, in this order."""
        self._queue.extendleft(reversed(ranges))

    def spend(self, ranges: Ranges) -> None:
        """Counts queued units as used: this replica has taken over the steps that used them."""
        self._queue = deque(x for part in self._queue for x in subtract((part,), ranges))
        self._used = union(self._used, ranges)

    def take(self) -> int | None:
        """The next unit; None when the queue is empty."""
        if not self._queue:
            return None
        start, stop = self._queue[0]
        if start + 1 < stop:
            self._queue[0] = (start + 1, stop)
        else:
            self._queue.popleft()
        self._taken.add(start)
        return start

    def draw(self, unit: int) -> bool:
        """Notes that the training loop has this unit's batch. False: the replica lost the unit, and must not use it."""
        if unit not in self._taken:
            return False
        self._taken.remove(unit)
        self._drawn.append(unit)
        return True

    def use(self) -> None:
        """Notes that an inner step has used all drawn units."""
        self._last, self._drawn = self._drawn, []
        if self._last:
            self._used = union(self._used, _each(self._last))

    def unuse(self) -> None:
        """Undoes `use` for the last step, which is in no contribution: its units are drawn again."""
        undone = [unit for unit in self._last if contains(self._used, ((unit, unit + 1),))]
        self._used = subtract(self._used, _each(undone))
        self._drawn[:0] = undone
        self._last = []

    def offer(self) -> Ranges:
        """The units that were used and are not done, for a contribution of all steps so far."""
        return self._used

    def redo(self, *, once: bool = False) -> None:
        """Queues used units that are not done again, first, since their steps are void.

        ``once``: units queued again before stay used: a batch that makes steps void each time would be taken forever.
        """
        again = subtract(self._used, self._redone) if once else self._used
        self._redone = union(self._redone, again) if once else ()
        self._queue.extendleft(reversed(again))
        self._used, self._last = subtract(self._used, again), []

    def settle(self, done: Ranges, own: Ranges) -> Ranges:
        """Settles units that are done, including those of this replica's ``own`` contribution.

        Returns other units that steps here have used, too, which must not happen. Those steps are kept; done units that
        are not used yet are dropped.
        """
        twice = subtract(intersect(self._used, done), own)
        self._used, self._redone = subtract(self._used, done), subtract(self._redone, done)
        self._queue = deque(x for part in self._queue for x in subtract((part,), done))
        self._taken = {unit for unit in self._taken if not contains(done, ((unit, unit + 1),))}
        return twice

    def kept(self) -> tuple[Ranges, Ranges]:
        """For a checkpoint: the units that were used and are not done, and those to be taken again, in their order."""
        prefetched = ((unit, unit + 1) for unit in (*self._drawn, *sorted(self._taken)))
        return self._used, (*prefetched, *self._queue)

    def put_back(self, used: Ranges, queue: Ranges) -> None:
        self.reset()
        self._used = used
        self._queue.extend(queue)

    def reset(self) -> None:
        """Drops all units, since the incarnation is gone."""
        self._queue.clear()
        self._taken.clear()
        self._drawn.clear()
        self._used, self._redone, self._last = (), (), []


def _each(units: list[int]) -> Ranges:
    return union((unit, unit + 1) for unit in units)
