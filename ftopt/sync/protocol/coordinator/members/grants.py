"""When replicas are granted units, coordinator side: the `Ledger`, the requests that wait, and the answers.

With step triggers a fault-free run is deterministic: in the order of ids, the members of a commit are granted as many
units as they have used, so that each holds what it ``wants`` again. A replica that runs short in between asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Cursor, Effects, Emit
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, send
from ftopt.sync.protocol.coordinator.rounds.assignment import Assignment, Claims, CountedUnits, count_units
from ftopt.sync.protocol.coordinator.rounds.attempts import Attempt
from ftopt.sync.protocol.intervals import Ranges, contains, low_water, size, subtract, union
from ftopt.sync.protocol.ledger.ledger import Ledger
from ftopt.sync.protocol.samples import Samples


class Grants(Assignment):
    """The ledger of a job as its coordinator keeps it: units are leased to replicas."""

    ledger: Ledger

    def __init__(self, samples: Samples, roster: Roster, *, fragments: int) -> None:
        self.samples: Samples = samples
        self.ledger = Ledger(samples)
        self._roster, self._fragments = roster, fragments
        self._asks: dict[m.IncarnationId, int] = {}
        self._early: dict[m.IncarnationId, int] = {}
        self._given_up = Counter[str]()
        """Replica -> how often it was declared gone for doing nothing with the last units, since a unit of it was last
        counted."""
        self._stuck = False
        self._notified_out_of_units: set[m.IncarnationId] = set()
        self._since_s: dict[m.IncarnationId, float] = {}

    # ------------------------------------------------------------ leases

    def open(self, claims: Claims, at: m.Position, done: Ranges) -> Effects:
        self.ledger.open(done, max(claims.cursor, self.ledger.cursor), claims.unheard)
        self._asks.clear()
        self._early.clear()
        self._freed()
        return [Cursor(self.ledger.promised)] if self.ledger.promised else []

    def admitted(self, member: Member, hello: m.Hello) -> Effects:
        """Takes the claim of a replica, whose units are known now, and grants what it lacks."""
        twice = self.ledger.claim(member.incarnation_id, hello.claim)
        self._freed()
        self._want(member, hello.wants)
        return [Emit("held_twice", *member.incarnation_id, data={"ranges": twice})] if twice else []

    def expect(self, incarnation_id: m.IncarnationId) -> None:
        self.ledger.expect(incarnation_id)

    def gone(self, incarnation_id: m.IncarnationId, member: Member | None, adopter: m.IncarnationId | None) -> Effects:
        self.ledger.gone(incarnation_id, adopter)
        self._early.pop(incarnation_id, None)
        self._freed()
        return []

    def adoptable(self, incarnation_id: m.IncarnationId) -> Ranges | None:
        lease = self.ledger.leases.get(incarnation_id)
        return None if lease is None else subtract(lease, self.ledger.under_way)

    def _want(self, member: Member, wants: int) -> None:
        member.wants = wants
        self.ask(member, wants - size(self.ledger.leases.get(member.incarnation_id, ())))

    def ask(self, member: Member, units: int) -> None:
        """Asks for units, which are granted when there are some and the member holds a state of every fragment. A
        member that dies before holds no units, so a new coordinator can make a cold start without hearing it."""
        if units <= 0 or member.leaving or member.standby:
            return
        if len(member.held) < self._fragments:
            self._early[member.incarnation_id] = units
        else:
            self._asks[member.incarnation_id] = units
            self._stuck = False

    def arrived(self, member: Member) -> None:
        self.ask(member, self._early.pop(member.incarnation_id, 0))

    # ------------------------------------------------------------ attempts

    def begin(self, attempt: Attempt) -> None:
        """HOLD: keeps the units that its contributions have used from being free."""
        attempt.ranges = union(*(c.ranges for c in attempt.contributions.values()))
        self.ledger.hold(attempt.ranges)

    def counts_without_weight(self, contributions: Mapping[str, m.Contribution]) -> bool:
        """Whether these contributions have used all units of their replicas, and no more are left: at the end of the
        data, units of steps that weigh nothing must be done, too."""
        ranges = union(*(c.ranges for c in contributions.values()))
        leases = self.ledger.leases.items()
        held = union(*(lease for incarnation_id, lease in leases if incarnation_id[0] in contributions))
        return self.ledger.exhausted and bool(held) and contains(ranges, held)

    def abort(self) -> None:
        self.ledger.release()
        self._freed()

    def commit(self, attempt: Attempt) -> CountedUnits:
        """DONE: marks the units that its contributions have used; its members are granted as many again."""
        before, ended = low_water(self.ledger.done), self.ledger.ended
        self.ledger.commit(attempt.ranges)
        for replica in [x for x, c in attempt.contributions.items() if c.ranges]:
            del self._given_up[replica]
        for member in self._roster.present(attempt.members):
            self._since_s.pop(member.incarnation_id, None)
            self._want(member, member.wants)
        if self.ledger.ended and not ended:
            self._asks.clear()
        return count_units(self.samples, attempt, before, self.ledger.done)

    # ------------------------------------------------------------ grants

    def step(self, now: float) -> Effects:
        """Grants units that members have asked for; a new end of the cursor's stride comes first (CURSOR)."""
        if not self._asks:
            self._since_s.clear()
            return []
        effects = [] if self._stuck else self._grant()
        needy = any(not self.ledger.leases.get(incarnation_id) for incarnation_id in self._asks)
        awaited: set[m.IncarnationId] = set()
        if self._stuck and needy:
            awaited = self.ledger.unheard.union(x for x, lease in self.ledger.leases.items() if lease)
        self._since_s = {x: self._since_s.get(x, now) for x in awaited}
        return effects

    def waits(self) -> Mapping[m.IncarnationId, float]:
        return self._since_s

    def gave_up(self, replica: str) -> None:
        """Counts that a replica was evicted. It gets no units while a replica evicted less often can use them: each
        replica here has its turn before one has another."""
        self._given_up[replica] += 1

    def times_given_up(self, replica: str) -> int:
        return self._given_up[replica]

    def _grant(self) -> Effects:
        here = {x.incarnation_id: x for x in self._roster.connected() if not x.leaving}
        self._asks = {x: units for x, units in sorted(self._asks.items()) if x in here}
        leases = self.ledger.leases
        users = [x for x in here if x in self._asks or leases.get(x)]
        least = min((self._given_up[x[0]] for x in users), default=0)
        able = {x for x in users if self._given_up[x[0]] == least}
        asks = [(x, units) for x, units in self._asks.items() if x in able]
        granted = self.ledger.grant(asks, shares=len(able))
        effects: Effects = []
        moved = self.ledger.promise()
        if moved:
            effects.append(Cursor(self.ledger.promised))
        for incarnation_id, member in here.items():
            ranges = granted.get(incarnation_id, ())
            refused = not ranges and incarnation_id in self._asks
            out_of_units = refused and incarnation_id not in self._notified_out_of_units
            if ranges or out_of_units or moved:
                effects += send([member], m.Grant(ranges, self.ledger.promised, out_of_units))
            if ranges:
                del self._asks[incarnation_id]
            elif out_of_units:
                self._notified_out_of_units.add(incarnation_id)
        self._stuck = bool(self._asks)
        return effects

    def _freed(self) -> None:
        self._stuck = False
        self._notified_out_of_units.clear()
