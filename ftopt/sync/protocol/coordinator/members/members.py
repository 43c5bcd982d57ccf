"""Changes of members: known, admitted, away, gone. Each change is journalled before it is sent."""

from __future__ import annotations

import math
from collections import Counter

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.members.backups import Backups
from ftopt.sync.protocol.coordinator.members.batch_shares import BatchShares
from ftopt.sync.protocol.coordinator.members.grants import Grants
from ftopt.sync.protocol.coordinator.members.losses import Losses
from ftopt.sync.protocol.coordinator.members.spares import Spares, over
from ftopt.sync.protocol.coordinator.roster.effects import (
    Close,
    Effects,
    Emit,
    Gone,
    JournalState,
    Known,
    SendTo,
    is_end,
)
from ftopt.sync.protocol.coordinator.roster.lines import trains_otherwise
from ftopt.sync.protocol.coordinator.roster.listener import Listener
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, send
from ftopt.sync.protocol.coordinator.rounds.assignment import Assignment
from ftopt.sync.protocol.coordinator.rounds.attempts import AttemptNumbers
from ftopt.sync.protocol.coordinator.rounds.gather import Gather
from ftopt.sync.protocol.coordinator.rounds.partitions import Partitions
from ftopt.sync.protocol.coordinator.rounds.rounds import Rounds
from ftopt.sync.protocol.coordinator.rounds.speeds import Speeds
from ftopt.sync.protocol.policy import FaultPolicy


class Members:
    """The roster, and all that follows changes of members: rounds, the assignment of samples, and other features."""

    def __init__(self, kept_gone: int) -> None:
        self.roster = Roster(kept_gone)
        self.rounds: list[Rounds] = []
        self.assignment = Assignment()
        self.backups = Backups(self.roster)
        self.losses = Losses(self.roster)
        self.speeds = Speeds(self.roster.connected)
        self.spares = Spares(self.roster)
        self._partitions = Partitions()
        self._policy = FaultPolicy()
        self._ended_at: int | None = None
        """END: fragment 0's newest version when a replica at its end left, if nobody has come since; else None."""
        self._left_with: tuple[int, str] = -1, ""
        """Fragment 0's newest version that a leaving replica held, and the last such replica."""
        self._saved_version = 0
        """Fragment 0's newest version before the job started up."""
        self._lines: dict[str, str] = {}
        self._first = ""
        """The job's first replica, which `_lines` describe."""
        self._byes: set[str] = set()
        """Members that have said `Bye`, and are still here."""

    @property
    def _listeners(self) -> tuple[Listener, ...]:
        """The listeners, in the order in which they are called."""
        return self.losses, self.speeds, self.spares, self._partitions, self.backups, self.assignment

    def define(self, hello: m.Hello, policy: FaultPolicy, numbers: AttemptNumbers) -> None:
        fragments, samples = hello.fragments, hello.samples
        self._lines, self._first = dict(hello.lines), hello.replica
        self._saved_version = self._version
        self._policy, self.assignment = policy, Assignment()
        if samples is not None and samples.global_batch is None:
            self.assignment = Grants(samples, self.roster, fragments=fragments)
        elif samples is not None:
            self.assignment = BatchShares(samples, self.roster, numbers, recheck_s=policy.dead_after_s)
        for listener in self._listeners:
            listener.define(policy)
        self.speeds.calls_in &= not self.assignment.whole_batch
        assignments = [self.assignment, *(Assignment() for _ in range(1, fragments))]
        self.rounds = [
            Rounds(
                Gather(f, self.roster, policy, partitions=self._partitions, assignment=assignment, speeds=self.speeds),
                numbers,
            )
            for f, assignment in enumerate(assignments)
        ]

    def remember(self, now: float, saved: JournalState) -> None:
        """Takes over the members from the journal; called before any other method."""
        self.roster.horizon.remember(saved)
        version = self._saved_version = next((d.version for d in reversed(saved.decided) if not d.fragment), 0)
        for incarnation_id in saved.gone:
            self.roster.forget(incarnation_id, version)
        self._ended_at = version if any(self.roster.is_gone(x) for x in saved.finished) else None
        for incarnation_id in saved.roster:
            if not self.roster.is_gone(incarnation_id):
                self.roster.know(incarnation_id, now)
                self.roster.members[incarnation_id[0]].finished = incarnation_id in saved.finished
        self.spares.remember(saved)
        if saved.left_early is not None:
            self.losses.remember(now, saved.left_early)

    @property
    def _version(self) -> int:
        """Fragment 0's newest version; while the job starts up, the one before."""
        version = self.rounds[0].at.version if self.rounds else -1
        return version if version >= 0 else self._saved_version

    @property
    def ended(self) -> bool:
        """END: whether a replica at its end has left, nobody has come since, and nobody has trained on."""
        return self._ended_at is not None and is_end(self._ended_at, self._version)

    def know(self, now: float, incarnation_id: m.IncarnationId) -> Effects:
        """Puts an incarnation on the roster, unless it is there, gone or superseded."""
        known = self.roster.members.get(incarnation_id[0])
        if self.roster.is_gone(incarnation_id) or (known is not None and known.incarnation >= incarnation_id[1]):
            return []
        effects = self.gone(known.incarnation_id, "superseded") if known is not None else []
        self.roster.know(incarnation_id, now)
        self._ended_at = None
        self.assignment.expect(incarnation_id)
        return [*effects, Known(*incarnation_id), *send(self.roster.connected(), m.RosterUpdate((incarnation_id,), ()))]

    def admit(self, now: float, conn: int, hello: m.Hello, *, epoch: int, initial_source: bool = False) -> Effects:
        """Welcomes a replica into the running job, and brings it up to date."""
        member = self.roster.members[hello.replica]
        self.roster.attach(member, conn, now)
        if not initial_source and any(self.off_branch(p) for p in hello.positions):
            return self.fork(member, hello.positions)
        member.address, member.leaving = hello.address, False
        member.proposed()
        member.at_end, member.dismissed = None, False
        member.resumed = hello.resumed
        member.counts = None if hello.resumed else member.counts  # else another process has reported them
        unlike = self._otherwise(member, hello) + self._unlike(member, hello.arithmetic)
        member.inner_step, member.state = hello.inner_step, "training" if hello.positions else "fetching"
        if member.counted is None:
            member.counted = {r.fragment: r.at.version for r in self.rounds} if hello.incarnation else {}
        member.held, member.maybe_fetched, member.said_bye = {p.fragment: p for p in hello.positions}, {}, False
        member.called_in.clear()  # it has forgotten call-ins with its connection
        first = [effect for x in self._listeners for effect in x.welcoming(member, hello)]
        member.state = "standby" if member.standby else member.state
        top, name = self.rounds[0].versions, "return" if hello.incarnation else "join"
        incarnation_ids, gone = self.roster.incarnation_ids(), self.roster.gone_ids()
        effects: Effects = [
            *first,
            SendTo(conn, m.Welcome(epoch, member.incarnation, incarnation_ids, gone, self.roster.horizon.told)),
            Emit(
                name, *member.incarnation_id, inner_step=top.last.inner_step, version=top.at.version,
                data={"resumed": True} if hello.resumed else {},
            ),
            *unlike,
        ]  # fmt: skip
        for r in self.rounds:
            effects += r.place(member, hello, initial_source=initial_source)
        return effects + [effect for x in self._listeners for effect in x.admitted(member, hello)]

    def _otherwise(self, member: Member, hello: m.Hello) -> Effects:
        """Says, once per incarnation, that a member trains differently from the replica that defined the job."""
        told, member.compared = member.compared, True
        reason = "" if told else trains_otherwise(hello.lines, self._lines, self._first)
        if not reason:
            return []
        event = Emit("unlike", *member.incarnation_id, data={"reason": reason, "others": []})
        return [event, *send([member], m.Hold(reason))]

    def _unlike(self, member: Member, arithmetic: str) -> Effects:
        """Says, once per incarnation, that a member's machine computes other bits than a connected replica's."""
        known, member.arithmetic = member.arithmetic, arithmetic
        if known or not arithmetic:
            return []
        others = [x for x in self.roster.connected() if x is not member and x.arithmetic]
        if not others:
            return []
        if Counter(x.arithmetic for x in others).most_common(1)[0][0] == arithmetic:
            return []
        others = [x for x in others if x.arithmetic != arithmetic]
        names = ", ".join(x.replica for x in others)
        reason = (
            f"the machine of {member.replica} rounds otherwise than those of {names}: the same steps give other bits, "
            "so that their models drift apart by rounding; every verify_every-th version they are made equal again"
        )
        event = Emit("unlike", *member.incarnation_id, data={"reason": reason, "others": [x.replica for x in others]})
        return [event, *send([member], m.Hold(reason))]

    def off_branch(self, position: m.Position) -> bool:
        """CHAIN: whether a position is not on this job's history."""
        return self.rounds[position.fragment].versions.off_branch(position)

    def fork(self, member: Member, positions: tuple[m.Position, ...]) -> Effects:
        """CHAIN: gives up a replica whose state is not on this job's history, so that its work cannot be merged."""
        at = next(p for p in positions if self.off_branch(p))
        event = Emit("fork", *member.incarnation_id, at.fragment, at.version, data={"chain": at.chain})
        return [event, *self.give_up(member, "its state is on another branch of the history")]

    def away(self, now: float, member: Member, *, close: bool = False) -> Effects:
        """Makes a member away: its connection is lost, or silent. It stays on the roster (STICKY)."""
        conn = member.conn
        self.roster.detach(member, now)
        for r in self.rounds:
            r.lose(member.replica)
        effects: Effects = [Close(conn)] if close and conn is not None else []
        effects += [effect for x in self._listeners for effect in x.away(member)]
        if member.said_bye:
            return [*effects, *self.leave(now, member)]
        return [*effects, Emit("lost", *member.incarnation_id, data=member.lost_since(now))]

    def give_up(self, member: Member, reason: str, *, why: str = "") -> Effects:
        """Makes a member gone for a reason of the job's. ``why``: another reason to show to users."""
        for listener in self._listeners:
            listener.given_up(member, why or reason)
        return self.gone(member.incarnation_id, reason)

    def gone(self, incarnation_id: m.IncarnationId, reason: str, *, adopter: m.IncarnationId | None = None) -> Effects:
        """Makes an incarnation gone, irrevocably: journalled, sent to all; the next commits drop its COUNT entries.

        ADOPT: its units are the ``adopter``'s, if there is one, until the adopter reports what it holds.
        """
        member = self.roster.members.get(incarnation_id[0])
        if member is not None and member.incarnation > incarnation_id[1]:
            member = None
        conn = member.conn if member is not None else None
        self.roster.forget(incarnation_id, self._version)
        if member is not None and member.finished:
            self._ended_at = self._version
        for r in self.rounds:
            r.gone(incarnation_id)
        follows = [effect for x in self._listeners for effect in x.gone(incarnation_id, member, adopter)]
        event = Emit("gone", *incarnation_id, data={"reason": reason})
        effects: Effects = [Gone(*incarnation_id), event]
        if conn is not None:
            effects += [SendTo(conn, m.Refuse("gone", reason)), Close(conn)]
        return [*effects, *follows, *send(self.roster.connected(), m.RosterUpdate((), (incarnation_id,)))]

    def forget_gone(self, epoch: int) -> Effects:
        """HORIZON. While the job runs: forgets gone incarnations that need not be remembered, and tells all members."""
        forgotten = self.roster.forget_gone(
            self.rounds[0].at, lambda replica: any(replica in r.decide.undropped for r in self.rounds), epoch=epoch
        )
        if forgotten is None:
            return []
        for r in self.rounds:  # without a new version, no commit has dropped them yet
            for replica in forgotten.replicas:
                r.decide.undropped.pop(replica, None)
        update = m.RosterUpdate((), (), self.roster.horizon.told, forgotten.replicas)
        return [forgotten, *send(self.roster.connected(), update)]

    def supersede(self, member: Member, hello: m.Hello) -> Effects:
        """Gives up ``member``, whose place a newcomer of its id takes with ``hello``."""
        effects = self.superseded(hello)
        why = "its process has ended, and another one has come in its place"
        return [*effects, *self.give_up(member, "superseded by a newcomer", why=why)]

    def superseded(self, hello: m.Hello) -> Effects:
        """Tells the listeners that a newcomer is about to take the place of the member of its id."""
        return [effect for x in self._listeners for effect in x.superseded(hello)]

    def adopted_work(self, member: Member) -> m.Inherit | None:
        """ADOPT: the work that a newcomer takes over from ``member``, whose id it has; asked before that is gone.

        None without a copy of all its uncounted work. HOLD: none while an attempt has its contribution.
        """
        if any(r.attempt and member.incarnation_id in r.attempt.members for r in self.rounds):
            return None
        ranges, source = self.assignment.adoptable(member.incarnation_id), self.backups.source_of(member)
        if ranges is None or source is None:
            return None
        return m.Inherit(member.incarnation_id, ranges, source, member.inner_step)

    def tail(self) -> list[tuple[Member, float]]:
        """TAIL: members that the rest of the data waits for, and when each is declared gone."""
        waits = self.assignment.waits()
        members = self.roster.members.values() if waits else ()
        return [(x, self._tail_s(x, waits[x.incarnation_id])) for x in members if x.incarnation_id in waits]

    def _tail_s(self, member: Member, since_s: float) -> float:
        """When a member is declared gone. Each time that it was evicted doubles its time, so that a merely slow one
        gets there. A joiner lost before its first step has only its units to lose, and a spare has nothing."""
        policy, quiet_since_s = self._policy, max(since_s, member.moved_s)
        for r in self.rounds:
            if member.conn is not None and (fetches_s := r.gather.catch_up.since_s(member.replica)) is not None:
                quiet_since_s = max(quiet_since_s, fetches_s + policy.evict_after_s)
        waits = (r for r in self.rounds if member.replica in r.gather.proposals and member.busy_since_s is None)
        for r in waits:  # its peers keep it waiting
            if r.attempt is None:
                return math.inf
            quiet_since_s = max(quiet_since_s, max(r.attempt.started_s, member.moved_s) + policy.evict_after_s)
        if member.conn is None and (member.untrained or member.standby):
            return quiet_since_s + policy.dead_after_s
        tail_s = policy.evict_after_s * 2.0 ** min(self.assignment.times_given_up(member.replica), 10)
        return quiet_since_s + tail_s + member.patience_s()

    def promote_spares(self, now: float) -> Effects:
        """SPARE: lets spares take the places of lost members; sends them home when nobody trains any more."""
        effects: Effects = []
        for lost, spare in self.spares.due(now):
            effects += self.spares.promote(lost, spare)
            spare.newcomer.update(r.fragment for r in self.rounds)
            effects += [effect for x in self._listeners for effect in x.promoted(spare)]
        for spare in self.spares.unneeded():
            assert spare.conn is not None
            effects += over(spare.conn, spare.incarnation_id)
            effects += self.leave(now, spare)
        return effects

    def bye(self, member: Member, *, early: bool, reason: str = "") -> None:
        """Notes a member's goodbye. ``early``: its part of the job is not done. ``reason``: the error."""
        member.leaving = member.said_bye = True
        member.early, member.ended_by = early, reason
        self._byes.add(member.replica)
        for r in self.rounds:
            r.withdraw(member.replica)

    def remove_leavers(self, now: float) -> Effects:
        """Lets members that said `Bye` leave, unless one is the only holder of a version that others may fetch."""
        effects: Effects = []
        leavers = [self.roster.members[x] for x in sorted(self._byes) if x in self.roster.members]
        leavers = [x for x in leavers if x.said_bye and x.conn is not None]
        self._byes = {x.replica for x in leavers}
        for member in leavers:
            others = [x for x in self.roster.connected() if not x.said_bye and (member.early or not x.standby)]
            held = [r.versions for r in self.rounds if r.versions.held_by(member)]
            if not others or all(any(v.held_by(x) for x in others) for v in held):
                effects += self.leave(now, member)
        return effects

    def left_with(self, version: int) -> str:
        """The last replica that left with this version of fragment 0; "": none."""
        newest, replica = self._left_with
        return replica if newest == version else ""

    def leave(self, now: float, member: Member) -> Effects:
        conn = member.conn
        if self.rounds[0].versions.held_by(member) and not member.standby:
            self._left_with = self.rounds[0].at.version, member.replica
        self.roster.detach(member, now)
        effects = [effect for x in self._listeners for effect in x.left(now, member)]
        data = ({"early": True} if member.early else {}) | member.counted_so_far
        data |= {"reason": member.ended_by} if member.ended_by else {}
        effects.append(Emit("leave", member.replica, member.incarnation, data=data))
        effects += self.gone(member.incarnation_id, "left")
        if conn is not None and self.losses.matter:  # tells it that its goodbye was heard
            effects.append(SendTo(conn, m.RosterUpdate((), (member.incarnation_id,))))
        return [*effects, Close(conn)] if conn is not None else effects
