"""Which neighbour keeps a copy of what a replica was between two inner steps, coordinator side (``recover: replay``).

A replica says that there is a copy (`Copied`), the coordinator names a neighbour (`Keep`), which fetches it from the
replica and says so (`Keeps`, or `KeepFailed`); the replica hears of it (`Kept`). When the replica has died and
another process comes under its name, that one repeats the work that is in no commit from the copy (`Inherit`).

A copy is good as long as no commit that it does not know has a contribution of the replica: nothing that was done since
the copy is counted then. Nothing of this is journalled: a new coordinator hears of copies again, and takes all that is
committed by then as counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit
from ftopt.sync.protocol.coordinator.roster.listener import Listener
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, send


@dataclass(slots=True)
class _Copies:
    """Of one replica: the newest copy that it has reported, and the one that its keeper has."""

    incarnation_id: m.IncarnationId
    keeper: m.IncarnationId
    newest: m.Copied
    kept: m.Copied | None = None
    failed: bool = False
    """The keeper could not fetch the newest one: another one is to keep the next."""


class Backups(Listener):
    """Which member keeps the copy of which."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._copies: dict[str, _Copies] = {}
        self._unkept: dict[str, tuple[m.IncarnationId, m.Copied]] = {}
        """Newest copies of replicas that have no neighbour."""
        self._told: set[str] = set()
        """Of which it was said that nobody keeps their copies, since somebody did last."""

    def copied(self, member: Member, message: m.Copied, *, tell: bool = True) -> Effects:
        """A replica has copied itself: its keeper, or a new one, is to fetch that."""
        before = self._copies.pop(member.replica, None)
        keeper = self._keeper(member, before)
        if keeper is None:
            self._unkept[member.replica] = member.incarnation_id, message
            return self._warn(member) if tell else []
        self._unkept.pop(member.replica, None)
        kept = None
        ids = (member.incarnation_id, keeper.incarnation_id)
        if before is not None and (before.incarnation_id, before.keeper) == ids:
            kept = before.kept
            if kept == before.newest == message:  # reported again after a reconnection
                self._copies[member.replica] = before
                return send([member], m.Kept(message.serial, keeper.replica))
        self._copies[member.replica] = _Copies(*ids, message, kept)
        return send([keeper], m.Keep(member.incarnation_id, message.serial, member.address))

    def _warn(self, member: Member) -> Effects:
        """Once, until a copy is kept again."""
        if member.replica in self._told or member.leaving:
            return []
        self._told.add(member.replica)
        reason = (
            f"no other replica is there to keep the copies of {member.replica} (sync.recover: replay): if it dies now, "
            "its inner steps since the last outer step are lost"
        )
        told = m.Kept(0, "", reason)
        return [Emit("not_kept", *member.incarnation_id, data={"reason": reason}), *send([member], told)]

    def admitted(self, member: Member, hello: m.Hello) -> Effects:
        return [] if member.standby else self.promoted(member)

    def promoted(self, member: Member) -> Effects:
        """It may keep copies."""
        effects: Effects = []
        for incarnation_id, message in list(self._unkept.values()):
            owner = self._roster.current(incarnation_id)
            if owner is not None and owner is not member and owner.conn is not None and not owner.leaving:
                effects += self.copied(owner, message)
        return effects

    def not_kept(self, member: Member) -> bool:
        """Whether nobody keeps its copies, and it was told so."""
        return member.replica in self._told

    def keeps(self, member: Member, message: m.Keeps) -> Effects:
        copies = self._copies.get(message.incarnation_id[0])
        if copies is None or (copies.incarnation_id, copies.keeper) != (message.incarnation_id, member.incarnation_id):
            return []
        if copies.newest.serial != message.serial:
            return []  # of an order before the last: the one that is kept is told of by its versions
        copies.kept, copies.failed = copies.newest, False
        self._told.discard(message.incarnation_id[0])
        data = {"keeper": member.replica, "versions": list(copies.newest.versions)}
        return [Emit("kept", *copies.incarnation_id, data=data), *self._tell(copies, member)]

    def failed(self, member: Member, message: m.KeepFailed) -> Effects:
        """A keeper could not fetch what it was to keep: what it has is kept, and another one gets the next copy."""
        owner = self._roster.current(message.incarnation_id)
        if owner is None or owner.leaving:
            return []  # nobody will want it
        data = {"keeper": member.replica, "serial": message.serial, "reason": message.reason}
        told: Effects = [Emit("keep_failed", *message.incarnation_id, data=data)]
        copies = self._copies.get(message.incarnation_id[0])
        if copies is None or (copies.incarnation_id, copies.keeper) != (message.incarnation_id, member.incarnation_id):
            return told
        if copies.newest.serial != message.serial:
            return told
        copies.failed = True
        return told + self._tell(copies, member, message.reason)

    def _tell(self, copies: _Copies, keeper: Member, reason: str = "") -> Effects:
        owner = self._roster.current(copies.incarnation_id)
        return send([owner] if owner is not None else [], m.Kept(copies.newest.serial, keeper.replica, reason))

    def away(self, member: Member) -> Effects:
        """A keeper is away, and drops what it keeps, or has left: others are to keep that. Where one has left at the
        end of the job the others do, too: that nobody is there is told when an outer step is made without it."""
        at_its_end = member.said_bye and not member.early
        kept_there = [r for r, copies in self._copies.items() if copies.keeper == member.incarnation_id]
        effects: Effects = []
        for replica in kept_there:
            copies = self._copies.pop(replica)
            owner = self._roster.current(copies.incarnation_id)
            if owner is not None and owner.conn is not None and not owner.leaving:
                effects += self.copied(owner, copies.newest, tell=not at_its_end)
        return effects

    def gone(self, incarnation_id: m.IncarnationId, member: Member | None, adopter: m.IncarnationId | None) -> Effects:
        """Its copy is not needed any more."""
        self._copies = {r: c for r, c in self._copies.items() if c.incarnation_id != incarnation_id}
        self._unkept = {r: x for r, x in self._unkept.items() if x[0] != incarnation_id}
        if incarnation_id[0] not in self._roster.members:
            self._told.discard(incarnation_id[0])
        return self.away(member) if member is not None else []

    def source_of(self, member: Member) -> str | None:
        """The address of a copy from which all of a replica's work that is in no commit can be repeated."""
        copies = self._copies.get(member.replica)
        if copies is None or copies.kept is None or copies.incarnation_id != member.incarnation_id:
            return None
        keeper, counted = self._roster.current(copies.keeper), member.counted or {}
        if keeper is None or keeper.conn is None:
            return None
        outdated = any(counted.get(f, 0) > version for f, version in enumerate(copies.kept.versions))
        return None if outdated else keeper.address

    def _keeper(self, member: Member, before: _Copies | None) -> Member | None:
        """The one so far, or the next in the order of ids."""
        others = [x for x in self._roster.training() if x.replica != member.replica and x.address and not x.leaving]
        if before is not None and (same := [x for x in others if x.incarnation_id == before.keeper]):
            if not before.failed or len(others) == 1:
                return same[0]
            others.remove(same[0])
        later = [x for x in others if x.replica > member.replica]
        return next(iter(later or others), None)
