"""Who is granted units when, coordinator side: the `Ledger`, the questions that wait, and what is told.

With step triggers a fault-free run is deterministic: whoever was a member of a commit is granted as many units as it
has used, so that it holds what it ``wants`` again, in the order of ids. Who runs short in between asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.effects import CoordinatorEffect, Cursor, Emit, SendTo
from ftopt.sync.protocol.coordinator.roster import Member, Roster
from ftopt.sync.protocol.intervals import Ranges, contains, low_water, size, union
from ftopt.sync.protocol.ledger.ledger import Ledger
from ftopt.sync.protocol.samples import Samples


class Grants:
    """The ledger of a job as its coordinator keeps it.

    Args:
        samples: what is counted.
        roster: who is there.
    """

    def __init__(self, samples: Samples, roster: Roster) -> None:
        self.samples = samples
        self.ledger = Ledger(samples)
        self._roster = roster
        self._asks: dict[m.IncarnationId, int] = {}
        self._early: dict[m.IncarnationId, int] = {}
        self.idle: set[str] = set()
        """Replicas that were given up since they did nothing with the last units."""
        self._stuck = False
        self._notified_out_of_units: set[m.IncarnationId] = set()
        self._since_s: dict[m.IncarnationId, float] = {}

    # ------------------------------------------------------------ who holds what

    def open(self, done: Ranges, cursor: int, unheard: Iterable[m.IncarnationId]) -> list[CoordinatorEffect]:
        """See `Ledger.open`; nobody has asked yet."""
        self.ledger.open(done, max(cursor, self.ledger.cursor), tuple(unheard))
        self._asks.clear()
        self._early.clear()
        self._freed()
        return [Cursor(self.ledger.promised)] if self.ledger.promised else []

    def admit(self, member: Member, hello: m.Hello) -> list[CoordinatorEffect]:
        """A member is welcomed: what it holds is known, and it is granted what it lacks."""
        twice = self.ledger.claim(member.incarnation_id, hello.claim)
        self._freed()
        self.want(member, hello.wants)
        return [Emit("held_twice", *member.incarnation_id, data={"ranges": twice})] if twice else []

    def expect(self, incarnation_id: m.IncarnationId) -> None:
        """A new name on the roster."""
        self.ledger.expect(incarnation_id)

    def gone(self, incarnation_id: m.IncarnationId, adopter: m.IncarnationId | None = None) -> None:
        """GONE; ADOPT."""
        self.ledger.gone(incarnation_id, adopter)
        self._early.pop(incarnation_id, None)
        self._freed()

    def want(self, member: Member, wants: int) -> None:
        """It shall hold so many units."""
        member.wants = wants
        self.ask(member, wants - size(self.ledger.leases.get(member.incarnation_id, ())))

    def ask(self, member: Member, units: int) -> None:
        """It shall be granted so many more as soon as there are any, and it holds a state to train on.

        Without one it has used nothing, and a new coordinator need not have heard of it before a cold start.
        """
        if units > 0 and not member.leaving:
            if 0 not in member.held:
                self._early[member.incarnation_id] = units
                return
            self._asks[member.incarnation_id] = units
            self._stuck = False

    def arrived(self, member: Member) -> None:
        """It has fetched a state."""
        self.ask(member, self._early.pop(member.incarnation_id, 0))

    # ------------------------------------------------------------ attempts

    def hold(self, contributions: Iterable[m.Contribution]) -> Ranges:
        """HOLD: an attempt begins. Returns all units that it marks done."""
        ranges = union(*(c.ranges for c in contributions))
        self.ledger.hold(ranges)
        return ranges

    def spent(self, contributions: Mapping[str, m.Contribution]) -> bool:
        """Whether these have used all that their replicas hold, and no more is to be had.

        Steps that weigh nothing make no version, but units that they have used must be done at the end of the data.
        """
        ranges = union(*(c.ranges for c in contributions.values()))
        leases = self.ledger.leases.items()
        held = union(*(lease for incarnation_id, lease in leases if incarnation_id[0] in contributions))
        return self.ledger.exhausted and bool(held) and contains(ranges, held)

    def release(self) -> None:
        """The attempt was aborted."""
        self.ledger.release()
        self._freed()

    def commit(self, members: Iterable[Member], ranges: Ranges) -> list[CoordinatorEffect]:
        """DONE: a commit marks what its contributions have used; its members are granted as much again."""
        ledger, per_epoch = self.ledger, self.samples.units_per_epoch
        before, ended = low_water(ledger.done) // per_epoch, ledger.ended
        ledger.commit(ranges)
        for member in members:
            self._since_s.pop(member.incarnation_id, None)
            self.want(member, member.wants)
        effects: list[CoordinatorEffect] = [
            Emit("epoch_done", data={"epoch": epoch}) for epoch in range(before, low_water(ledger.done) // per_epoch)
        ]
        if ledger.ended and not ended:
            self._asks.clear()
            effects.append(Emit("data_ended", data={"units": ledger.cursor}))
        return effects

    # ------------------------------------------------------------ grants

    def step(self, now: float) -> list[CoordinatorEffect]:
        """Grants what is asked for, the end of the cursor's stride first (CURSOR)."""
        if not self._asks:
            self._since_s.clear()
            return []
        effects = [] if self._stuck else self._grant()
        needy = any(not self.ledger.leases.get(incarnation_id) for incarnation_id in self._asks)
        awaited = {
            incarnation_id for incarnation_id, lease in self.ledger.leases.items() if lease
        } | self.ledger.unheard
        awaited = awaited if self._stuck and needy else set()
        self._since_s = {incarnation_id: self._since_s.get(incarnation_id, now) for incarnation_id in awaited}
        return effects

    def waits_since_s(self, incarnation_id: m.IncarnationId) -> float:
        """Since when somebody has nothing left but what that one may hold, and nothing of it was counted; else inf.

        That is the tail of the data: who has hung, or is away, is waited for no longer than ``tail_s``.
        """
        return self._since_s.get(incarnation_id, math.inf)

    def _grant(self) -> list[CoordinatorEffect]:
        here = {x.incarnation_id: x for x in self._roster.connected() if not x.leaving}
        self._asks = {
            incarnation_id: units for incarnation_id, units in sorted(self._asks.items()) if incarnation_id in here
        }
        # Who has sat on units at the end of the data gets none, as long as another one can use them.
        able = [
            incarnation_id
            for incarnation_id in here
            if incarnation_id[0] not in self.idle
            and (incarnation_id in self._asks or self.ledger.leases.get(incarnation_id))
        ]
        asks = [
            (incarnation_id, units)
            for incarnation_id, units in self._asks.items()
            if not able or incarnation_id in able
        ]
        granted = self.ledger.grant(asks, shares=len(able or here))
        effects: list[CoordinatorEffect] = []
        moved = self.ledger.promise()
        if moved:
            effects.append(Cursor(self.ledger.promised))
        for incarnation_id, member in here.items():
            ranges = granted.get(incarnation_id, ())
            out_of_units = (
                not ranges and incarnation_id in self._asks and incarnation_id not in self._notified_out_of_units
            )
            if member.conn is not None and (ranges or out_of_units or moved):
                effects.append(SendTo(member.conn, m.Grant(ranges, self.ledger.promised, out_of_units)))
            if ranges:
                del self._asks[incarnation_id]
            elif out_of_units:
                self._notified_out_of_units.add(incarnation_id)
        self._stuck = bool(self._asks)
        return effects

    def _freed(self) -> None:
        self._stuck = False
        self._notified_out_of_units.clear()
