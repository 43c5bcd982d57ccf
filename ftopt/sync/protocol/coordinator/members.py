"""What happens to members, and whom it is told: known, away, gone. Each change is journalled before it is told."""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.attempts import Numbers
from ftopt.sync.protocol.coordinator.backups import Neighbours
from ftopt.sync.protocol.coordinator.batch_shares import Sharing
from ftopt.sync.protocol.coordinator.effects import Close, Effect, Gone, Known, Send, Tell
from ftopt.sync.protocol.coordinator.grants import Lending
from ftopt.sync.protocol.coordinator.partitions import Cuts
from ftopt.sync.protocol.coordinator.roster import Member, Roster
from ftopt.sync.protocol.coordinator.rounds import Rounds
from ftopt.sync.protocol.intervals import subtract
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.protocol.settings import Sync


class Members:
    """The roster and the fragments' rounds, which a member's fate touches."""

    def __init__(self) -> None:
        self.roster = Roster()
        self.rounds: list[Rounds] = []
        self.samples: Samples | None = None
        self.lending: Lending | None = None
        self.sharing: Sharing | None = None
        self.neighbours = Neighbours(self.roster)
        self._cuts = Cuts()

    def define(self, fragments: int, sync: Sync, numbers: Numbers, samples: Samples | None) -> None:
        """The first replica of a job defines it."""
        self.rounds = [Rounds(f, self.roster, sync, numbers, self._cuts) for f in range(fragments)]
        for r in self.rounds:
            r.undropped = dict(self.roster.gone)
        self.samples, self.lending, self.sharing = samples, None, None
        if samples is not None and samples.global_batch is None:
            self.lending = self.rounds[0].lending = Lending(samples, self.roster)
        elif samples is not None:
            self.sharing = self.rounds[0].sharing = Sharing(samples, numbers)

    def know(self, now: float, mark: m.Mark) -> list[Effect]:
        """Puts an incarnation on the roster, unless it is there, gone or superseded."""
        known = self.roster.members.get(mark[0])
        if self.roster.is_gone(mark) or (known is not None and known.incarnation >= mark[1]):
            return []
        effects = self.gone(known.mark, "superseded") if known is not None else []
        self.roster.know(mark, now)
        if self.lending is not None:
            self.lending.expect(mark)
        return [*effects, Known(*mark), *self.broadcast(m.Roster((mark,), ()))]

    def away(self, now: float, member: Member, *, close: bool = False) -> list[Effect]:
        """Suspicion: the connection is lost, or silent. The roster keeps the member (STICKY)."""
        conn = member.conn
        self.roster.detach(member, now)
        for r in self.rounds:
            r.lose(member.replica)
        effects: list[Effect] = [Close(conn)] if close and conn is not None else []
        effects += self.neighbours.lost(member)
        if member.said_bye:
            return [*effects, *self.leave(now, member)]
        return [*effects, Tell("lost", member.replica, member.incarnation)]

    def gone(self, mark: m.Mark, reason: str, *, heir: m.Mark | None = None) -> list[Effect]:
        """Irrevocable: journalled, told to everybody, its COUNT entries dropped with the next commits.

        ADOPT: what it held is ``heir``'s, if there is one, until that one says itself what it holds.
        """
        member = self.roster.members.get(mark[0])
        conn = member.conn if member is not None and member.incarnation <= mark[1] else None
        self.roster.forget(mark)
        self._cuts.forget(mark)
        self.neighbours.forget(mark)
        for r in self.rounds:
            r.undropped[mark[0]] = max(mark[1], r.undropped.get(mark[0], 0))
            if mark[0] not in self.roster.members:
                r.lose(mark[0])
        if self.lending is not None:
            self.lending.gone(mark, heir)
        effects: list[Effect] = [Gone(*mark), Tell("gone", mark[0], mark[1], data={"reason": reason})]
        if conn is not None:
            effects += [Send(conn, m.Refused("gone", reason)), Close(conn)]
        return [*effects, *self.broadcast(m.Roster((), (mark,)))]

    def heritage(self, member: Member) -> m.Inherit | None:
        """ADOPT: what a newcomer takes over of ``member``, whose name it has: before that one is gone.

        Nothing, unless a neighbour keeps a copy of all its work that is not counted. HOLD: nothing either while an
        attempt under way has its contribution.
        """
        if self.lending is None or any(r.attempt and member.mark in r.attempt.members for r in self.rounds):
            return None
        lease, source = self.lending.ledger.leases.get(member.mark), self.neighbours.source_of(member)
        if lease is None or source is None:
            return None
        ranges = subtract(lease, self.lending.ledger.under_way)
        return m.Inherit(member.mark, ranges, source, member.inner_step)

    def leave(self, now: float, member: Member) -> list[Effect]:
        """A goodbye: gone in good order."""
        conn = member.conn
        self.roster.detach(member, now)
        effects: list[Effect] = [Tell("leave", member.replica, member.incarnation)]
        effects += self.gone(member.mark, "left")
        return [*effects, Close(conn)] if conn is not None else effects

    def broadcast(self, message: m.FromCoordinator) -> list[Effect]:
        """To everybody who is connected."""
        return [Send(x.conn, message) for x in self.roster.connected() if x.conn is not None]
