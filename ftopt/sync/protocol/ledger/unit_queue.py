"""A replica's side of the sample ledger: the units that it was granted, from the grant to the commit.

    queued  --take-->  taken  --draw-->  drawn  --use-->  used  --offer: in a contribution-->  done

A loader *takes* units ahead (QUEUE: in the order of the grants); the training loop *draws* the batches in which they
come; an inner step *uses* what was drawn. A contribution carries all that was used and is not done yet.
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
        """Units that are taken or drawn and that no step has used yet."""
        return len(self._taken) + len(self._drawn)

    def grant(self, ranges: Ranges) -> None:
        self._queue.extend(ranges)

    def grant_first(self, ranges: Ranges) -> None:
        """These come before all others, in this order."""
        self._queue.extendleft(reversed(ranges))

    def spend(self, ranges: Ranges) -> None:
        """Queued units count as used: this replica has taken over the steps that used them."""
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
        """The training loop has this unit's batch. False: the replica lost the unit, and must not use it."""
        if unit not in self._taken:
            return False
        self._taken.remove(unit)
        self._drawn.append(unit)
        return True

    def use(self) -> None:
        """An inner step has used all that was drawn."""
        self._last, self._drawn = self._drawn, []
        if self._last:
            self._used = union(self._used, _each(self._last))

    def unuse(self) -> None:
        """That step is undone, and in no contribution: what it used is drawn, as it was before."""
        undone = [unit for unit in self._last if contains(self._used, ((unit, unit + 1),))]
        self._used = subtract(self._used, _each(undone))
        self._drawn[:0] = undone
        self._last = []

    def offer(self) -> Ranges:
        """What was used and is not done: for a contribution of all steps so far."""
        return self._used

    def redo(self, *, once: bool = False) -> None:
        """The steps that have used what is not done are void: it is queued again, first.

        ``once``: units that were queued again in this way before stay used: what makes steps void each time would be
        taken for ever.
        """
        again = subtract(self._used, self._redone) if once else self._used
        self._redone = union(self._redone, again) if once else ()
        self._queue.extendleft(reversed(again))
        self._used, self._last = subtract(self._used, again), []

    def settle(self, done: Ranges, own: Ranges) -> Ranges:
        """These are done, among them those of this replica's ``own`` contribution.

        Returns what steps here have used too, which must not happen. Those steps are kept; what is not used yet is not
        used any more.
        """
        twice = subtract(intersect(self._used, done), own)
        self._used, self._redone = subtract(self._used, done), subtract(self._redone, done)
        self._queue = deque(x for part in self._queue for x in subtract((part,), done))
        self._taken = {unit for unit in self._taken if not contains(done, ((unit, unit + 1),))}
        return twice

    def kept(self) -> tuple[Ranges, Ranges]:
        """For a checkpoint: what was used and is not done, and what is to be taken again, in that order."""
        prefetched = ((unit, unit + 1) for unit in (*self._drawn, *sorted(self._taken)))
        return self._used, (*prefetched, *self._queue)

    def put_back(self, used: Ranges, queue: Ranges) -> None:
        self.reset()
        self._used = used
        self._queue.extend(queue)

    def reset(self) -> None:
        """The incarnation is gone, with all that it held."""
        self._queue.clear()
        self._taken.clear()
        self._drawn.clear()
        self._used, self._redone, self._last = (), (), []


def _each(units: list[int]) -> Ranges:
    return union((unit, unit + 1) for unit in units)
