"""Which neighbour keeps a replica's copy, taken between two inner steps; coordinator side (``recover: replay``).

A replica reports a copy (`Copied`), and the coordinator names a neighbour (`Keep`), which fetches the copy from the
replica and reports back (`Keeps` or `KeepFailed`); the replica hears of it (`Kept`). When the replica has died and
another process comes under its id, that process repeats the work in no commit from the copy (`Inherit`).

A copy is valid until a commit later than its versions has a contribution of the replica: until then nothing done since
the copy is counted. Nothing of this is journalled: a new coordinator hears of copies again, and assumes that all
earlier commits counted the replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit
from ftopt.sync.protocol.coordinator.roster.listener import Listener
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, send


@dataclass(slots=True)
class _Copies:
    """The newest copy that one replica has reported, and the copy that its keeper has."""

    incarnation_id: m.IncarnationId
    keeper: m.IncarnationId
    newest: m.Copied
    kept: m.Copied | None = None
    failed: bool = False
    """The keeper could not fetch the newest copy: another member is to keep the next one."""


class Backups(Listener):
    """Assigns a keeper to each replica's copy."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._copies: dict[str, _Copies] = {}
        self._unkept: dict[str, tuple[m.IncarnationId, m.Copied]] = {}
        """The newest copies of replicas that have no neighbour."""
        self._told: set[str] = set()
        """Replicas that know that nobody keeps their copies now."""

    def copied(self, member: Member, message: m.Copied, *, tell: bool = True) -> Effects:
        """Makes a replica's keeper, or a new one, fetch the copy that the replica has reported."""
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
        """Says that nobody keeps a replica's copies; once, until a copy is kept again."""
        if member.replica in self._told or member.leaving:
            return []
        self._told.add(member.replica)
        reason = (
            f"no other replica is there to keep the copies of {member.replica} (policy.recover: replay): if it dies "
            "now, its inner steps since the last outer step are lost"
        )
        told = m.Kept(0, "", reason)
        return [Emit("not_kept", *member.incarnation_id, data={"reason": reason}), *send([member], told)]

    def admitted(self, member: Member, hello: m.Hello) -> Effects:
        return [] if member.standby else self.promoted(member)

    def promoted(self, member: Member) -> Effects:
        """Lets a member keep the copies that had no keeper."""
        effects: Effects = []
        for incarnation_id, message in list(self._unkept.values()):
            owner = self._roster.current(incarnation_id)
            if owner is not None and owner is not member and owner.conn is not None and not owner.leaving:
                effects += self.copied(owner, message)
        return effects

    def not_kept(self, member: Member) -> bool:
        """Whether nobody keeps its copies, and it knows."""
        return member.replica in self._told

    def keeps(self, member: Member, message: m.Keeps) -> Effects:
        copies = self._copies.get(message.incarnation_id[0])
        if copies is None or (copies.incarnation_id, copies.keeper) != (message.incarnation_id, member.incarnation_id):
            return []
        if copies.newest.serial != message.serial:
            return []  # of an earlier order: only the newest copy's versions are known
        copies.kept, copies.failed = copies.newest, False
        self._told.discard(message.incarnation_id[0])
        data = {"keeper": member.replica, "versions": list(copies.newest.versions)}
        return [Emit("kept", *copies.incarnation_id, data=data), *self._tell(copies, member)]

    def failed(self, member: Member, message: m.KeepFailed) -> Effects:
        """A keeper could not fetch a copy: it keeps the copy that it has, and another member gets the next one."""
        owner = self._roster.current(message.incarnation_id)
        if owner is None or owner.leaving:
            return []  # nobody will need the copy
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
        """Finds other keepers for the copies of a keeper that is away, and so drops them, or has left. At the end of
        the job the others leave, too: then a replica without a keeper is warned only at the next outer step."""
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
        """Drops the copy of a gone incarnation."""
        self._copies = {r: c for r, c in self._copies.items() if c.incarnation_id != incarnation_id}
        self._unkept = {r: x for r, x in self._unkept.items() if x[0] != incarnation_id}
        if incarnation_id[0] not in self._roster.members:
            self._told.discard(incarnation_id[0])
        return self.away(member) if member is not None else []

    def source_of(self, member: Member) -> str | None:
        """The address of a copy from which all of a replica's uncommitted work can be repeated; None: there is none."""
        copies = self._copies.get(member.replica)
        if copies is None or copies.kept is None or copies.incarnation_id != member.incarnation_id:
            return None
        keeper, counted = self._roster.current(copies.keeper), member.counted or {}
        if keeper is None or keeper.conn is None:
            return None
        outdated = any(counted.get(f, 0) > version for f, version in enumerate(copies.kept.versions))
        return None if outdated else keeper.address

    def _keeper(self, member: Member, before: _Copies | None) -> Member | None:
        """The present keeper, or the next member in the order of ids."""
        others = [x for x in self._roster.training() if x.replica != member.replica and x.address and not x.leaving]
        if before is not None and (same := [x for x in others if x.incarnation_id == before.keeper]):
            if not before.failed or len(others) == 1:
                return same[0]
            others.remove(same[0])
        later = [x for x in others if x.replica > member.replica]
        return next(iter(later or others), None)
