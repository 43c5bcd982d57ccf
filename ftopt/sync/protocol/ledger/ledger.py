"""The coordinator's side of the sample ledger: which units are done, which are leased, and which may be granted.

A unit from 0 up to the *cursor* is in exactly one of four sets. Three are stored, the fourth is the rest:

    free = [0, cursor) - done - leases of incarnations that are not gone - units of the attempt under way

- DONE: only `commit` marks units as done, those that an attempt's contributions have used.
- HOLD: units that an undecided attempt has used are not free, even if their owner is gone.
- TOTAL: `claim` replaces all that was known of an incarnation, also grants that did not arrive.
- GONE: only `gone` releases a lease.
- LIMBO: after a start the leases are unknown; until each incarnation on the roster is heard or gone, nothing below the
  cursor is granted.
- CURSOR: only units below ``promised`` are granted, which the journal and the replicas know. A restart goes on there.

Sizes are bounded: a lease has `MAX_PARTS` ranges at most, and ``done`` as many holes as there are leases and returned
pieces of them; at `MAX_HOLES`, no units beyond the cursor are granted until some holes have closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ftopt.sync.protocol.intervals import Ranges, end, first, intersect, size, subtract, union
from ftopt.sync.protocol.limits import MAX_DONE, MAX_RANGES, MAX_UNIT, MAX_WANTS
from ftopt.sync.protocol.messages import IncarnationId
from ftopt.sync.protocol.samples import Samples

STRIDE = 1024  # units by which the promised end is ahead, at least: one journal entry per stride
MAX_PIECES = 16  # ranges of one grant
MAX_PARTS = MAX_RANGES // 2  # of one lease: with more, a replica must get something counted first
MAX_HOLES = MAX_DONE // 2


@dataclass
class Ledger:
    """The units of one job."""

    samples: Samples
    done: Ranges = ()  # in the committed state
    cursor: int = 0  # no unit from here on was ever granted
    promised: int = 0  # where the journalled stride ends
    leases: dict[IncarnationId, Ranges] = field(default_factory=dict)  # granted, in no commit, not gone
    under_way: Ranges = ()  # units that the contributions of the undecided attempt have used
    unheard: set[IncarnationId] = field(default_factory=set)  # incarnations that may hold any units (LIMBO)

    def open(self, done: Ranges, cursor: int, unheard: Sequence[IncarnationId]) -> None:
        """Begins with a coordinator, or after a rollback; leases follow by `claim`.

        ``cursor``: the highest that the journal, the replicas or the coordinator itself know.
        """
        self.done, self.under_way, self.leases = done, (), {}
        self.unheard = set(unheard)
        self._reach(max(cursor, end(done)))

    def claim(self, incarnation_id: IncarnationId, ranges: Ranges) -> Ranges:
        """TOTAL: sets all that an incarnation holds. Returns units that others hold, too, which must not happen."""
        self.unheard.discard(incarnation_id)
        self._reach(end(ranges))
        held = subtract(ranges, self.done)
        others = union(*(lease for other, lease in self.leases.items() if other != incarnation_id)) if held else ()
        self.leases[incarnation_id] = held
        return intersect(held, others)

    def expect(self, incarnation_id: IncarnationId) -> None:
        """LIMBO: notes that the units of an incarnation on the roster are unknown.

        It is new on the roster (a newcomer claims at once), or its process, which had resumed from a checkpoint, is
        lost: another process may come from a newer checkpoint.
        """
        self.unheard.add(incarnation_id)

    def gone(self, incarnation_id: IncarnationId, adopter: IncarnationId | None = None) -> None:
        """GONE: frees an incarnation's units, except those of an attempt under way. ADOPT: or ``adopter`` gets them."""
        replica, newest = incarnation_id
        for known in [x for x in (*self.leases, *self.unheard) if x[0] == replica and x[1] <= newest]:
            held = self.leases.pop(known, ())
            self.unheard.discard(known)
            if adopter is not None and held:
                self.leases[adopter] = union(self.leases.get(adopter, ()), held)

    def hold(self, ranges: Ranges) -> None:
        """HOLD: keeps the units of an attempt that begins."""
        self.under_way = ranges

    def release(self) -> None:
        self.under_way = ()

    def commit(self, ranges: Ranges) -> None:
        """DONE: marks the units of the attempt under way, including those of dead and weightless members."""
        self.under_way = ()
        self.done = union(self.done, ranges)
        self.leases = {x: subtract(lease, ranges) for x, lease in self.leases.items()}

    def free(self) -> Ranges:
        return subtract(((0, self.cursor),), union(self.done, self.under_way, *self.leases.values()))

    def grant(self, asks: Sequence[tuple[IncarnationId, int]], *, shares: int = 1) -> dict[IncarnationId, Ranges]:
        """Leases units to those that ask, in their order, the smallest units first; none if there are none.

        Near the end of the data each gets at most its share of the rest, which ``shares`` replicas are to use up.
        """
        free = self.free() if not self.unheard and self.cursor else ()
        rest, share = self._fresh(), MAX_UNIT
        if self.samples.units is not None:
            share = max(1, -(-(size(free) + rest) // max(shares, len(asks), 1)))
        granted: dict[IncarnationId, Ranges] = {}
        for incarnation_id, asked in asks:
            count = min(asked, share)
            if len(self.leases.get(incarnation_id, ())) + MAX_PIECES > MAX_PARTS:
                continue
            found = first(free, count, parts=MAX_PIECES - 1)
            free = subtract(free, found)
            if fresh := min(count - size(found), rest):
                found = union(found, ((self.cursor, self.cursor + fresh),))
                self.cursor, rest = self.cursor + fresh, rest - fresh
            if found:
                self.leases[incarnation_id] = union(self.leases.get(incarnation_id, ()), found)
                granted[incarnation_id] = found
        return granted

    def promise(self) -> bool:
        """CURSOR: called before a grant is sent. Returns whether the promised end has moved, and must be journalled."""
        if self.cursor <= self.promised:
            return False
        self.promised = self._below_end(self.cursor + max(STRIDE, self.cursor - self.promised))
        return True

    @property
    def exhausted(self) -> bool:
        """Whether every unit of the job is done or leased: none is left to grant, unless a replica loses its units."""
        return self.samples.units is not None and self.cursor >= self.samples.units and not self.free()

    @property
    def ended(self) -> bool:
        return self.samples.units is not None and self.done == ((0, self.samples.units),)

    def _below_end(self, unit: int) -> int:
        return unit if self.samples.units is None else min(unit, self.samples.units)

    def _reach(self, cursor: int) -> None:
        self.cursor = self._below_end(max(self.cursor, cursor))
        self.promised = max(self.promised, self.cursor)

    def _fresh(self) -> int:
        """The number of units from the cursor on that may be granted now."""
        return 0 if len(self.done) > MAX_HOLES else self._below_end(self.cursor + MAX_WANTS) - self.cursor
