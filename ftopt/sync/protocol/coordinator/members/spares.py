"""SPARE: replicas that stand by, and the lost replicas whose places they take.

A spare is a member that holds the committed state like any other, and fetches each new version; it proposes nothing,
holds no units, and nothing waits for it. When a replica that trains is lost, the spare with the newest state is
*promoted*: it begins to train like a joiner. A replica is lost when it has been away for two heartbeats, since a living
one connects again at once, or when it leaves before its part of the job is done. A lost replica stays on the roster
(STICKY), and may come back: then both train. Each incarnation is replaced once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit, JournalState, Replaced, SendTo, Standby
from ftopt.sync.protocol.coordinator.roster.listener import Listener
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster
from ftopt.sync.protocol.policy import FaultPolicy

_OVER = "every replica that trained has left the job, so that this spare is not needed any more"


def misfit(hello: m.Hello, policy: FaultPolicy) -> str:
    """Why a job with these settings cannot have spares; "" when it can, or the replica is no spare."""
    if not hello.standby or policy.on_loss != "fail":
        return ""
    return (
        f"replica {hello.replica} stands by, but the loss of a replica ends job {hello.job!r} (policy.on_loss: fail), "
        "so that no place will be taken; leave out standby, or use on_loss: go_on"
    )


def over(conn: int, incarnation_id: m.IncarnationId, reason: str = _OVER) -> Effects:
    """Sends home a spare, or a replica that comes after the job's end."""
    return [Emit("over", *incarnation_id, data={"reason": reason}), SendTo(conn, m.Over(reason))]


class Spares(Listener):
    """Replaces lost members by spares; `Member.standby` tells which members are spares."""

    def __init__(self, roster: Roster) -> None:
        self._roster, self._policy = roster, FaultPolicy()
        self._journalled: set[m.IncarnationId] = set()
        """Incarnations that are spares according to the journal."""
        self._replaced: dict[m.IncarnationId, Replaced] = {}
        self._owed: list[m.IncarnationId] = []
        """Incarnations to be replaced: they left early while no spare was connected, or restarted as spares."""
        self._finished = False
        """Whether a replica that had done its part has left, or a restarted coordinator finds nobody that trains."""

    def remember(self, saved: JournalState) -> None:
        """Takes over the journal's entries; the roster is set already."""
        self._journalled = set(saved.standby)
        for member in self._roster.present(saved.standby):
            member.standby = True
        for x in saved.replaced:
            if x.by:
                self._replaced[x.lost] = x
            else:
                self._owed.append(x.lost)
        if saved.standby or saved.replaced:
            self.opened()

    def opened(self) -> None:
        """Called when the roster is known, after a start. If it has only spares and replaced members, the others have
        left: a member lost while a spare was there would be replaced, or on the roster."""
        self._finished |= all(x.standby or x.incarnation_id in self._replaced for x in self._roster.members.values())

    @property
    def come_late(self) -> bool:
        """Whether the job has finished, as far as its roster tells, so that a new spare has nobody to stand by for."""
        return self._finished and not self._owed

    # ------------------------------------------------------------ members

    def define(self, policy: FaultPolicy) -> None:
        self._policy = policy

    def welcoming(self, member: Member, hello: m.Hello) -> Effects:
        """Notes whether a member stands by. A promoted spare may not have heard of its promotion."""
        incarnation_id = member.incarnation_id
        member.standby = hello.standby and self._place_of(incarnation_id) is None
        if member.standby == (incarnation_id in self._journalled):
            return [] if member.standby else self._returned(incarnation_id)
        if not member.standby:  # it was promoted by a coordinator that knew more than this journal
            return self._taken(Replaced("", 0, *incarnation_id))
        self._journalled.add(incarnation_id)
        return [Standby(*incarnation_id), Emit("spare", *incarnation_id)]

    def _returned(self, incarnation_id: m.IncarnationId) -> Effects:
        """Notes that a replica that had left early trains again, so that it needs no replacement."""
        back = [x for x in self._owed if x[0] == incarnation_id[0]]
        self._owed = [x for x in self._owed if x not in back]
        return [effect for x in back for effect in self._taken(Replaced(*x, *incarnation_id))]

    def admitted(self, member: Member, hello: m.Hello) -> Effects:
        """Tells a spare that it was promoted meanwhile."""
        place = self._place_of(member.incarnation_id)
        if not hello.standby or member.standby or place is None or member.conn is None:
            return []
        return [SendTo(member.conn, m.Promote(place.replica))]

    def _place_of(self, incarnation_id: m.IncarnationId) -> Replaced | None:
        return next((x for x in self._replaced.values() if x.spare == incarnation_id), None)

    def left(self, now: float, member: Member) -> Effects:
        if member.standby:
            return []
        self._finished |= not member.early
        if not member.early or member.incarnation_id in self._replaced:
            return []
        return self._owe(member.incarnation_id) if self._known() else []

    def will_train(self, hello: m.Hello) -> bool:
        """Whether a newcomer trains: at once, or as the only spare when its predecessor is lost. If so, it adopts the
        predecessor's units (ADOPT); a spare must not, since the others would wait for them."""
        return not hello.standby or (self._is_lost_by(hello) and not self._ready())

    def _is_lost_by(self, hello: m.Hello) -> bool:
        """Whether the newcomer's predecessor trained, and nobody has taken its place."""
        old = self._roster.members.get(hello.replica)
        return old is not None and not old.standby and old.incarnation_id not in self._replaced

    def superseded(self, hello: m.Hello) -> Effects:
        """If the predecessor trained and the newcomer stands by, the predecessor needs a replacement. This happens when
        a promoted spare dies and is restarted by the same command."""
        if not hello.standby or not self._is_lost_by(hello):
            return []
        return self._owe(self._roster.members[hello.replica].incarnation_id)

    def _owe(self, lost: m.IncarnationId) -> Effects:
        """Journals once that an incarnation is to be replaced: a coordinator may have died between this and `Gone`."""
        if lost in self._owed:
            return []
        self._owed.append(lost)
        return [Replaced(*lost)]

    def gone(self, incarnation_id: m.IncarnationId, member: Member | None, adopter: m.IncarnationId | None) -> Effects:
        current = self._roster.current
        self._journalled = {x for x in self._journalled if current(x)}
        self._replaced = {lost: x for lost, x in self._replaced.items() if current(lost) or current(x.spare)}
        return []

    # ------------------------------------------------------------ promotion

    def due(self, now: float) -> list[tuple[m.IncarnationId, Member]]:
        """Lost incarnations, and the spares that are to take their places: the newest state first, then by id."""
        if not (spares := self._ready()):
            return []
        spares.sort(key=lambda x: (-sum(p.version + 1 for p in x.held.values()), x.replica))
        lost = [x.incarnation_id for x in self._absent() if now >= self._lost_s(x)]
        return list(zip([*self._owed, *lost], spares, strict=False))

    def promote(self, lost: m.IncarnationId, spare: Member) -> Effects:
        """Promotes a spare. JOURNAL: a restarted coordinator neither promotes another for this loss, nor forgets it."""
        assert spare.conn is not None
        spare.standby = False
        if lost in self._owed:
            self._owed.remove(lost)
        data = {"in_place_of": lost[0]}
        return [
            *self._taken(Replaced(*lost, *spare.incarnation_id)),
            Emit("promoted", *spare.incarnation_id, data=data),
            SendTo(spare.conn, m.Promote(lost[0])),
        ]

    def _taken(self, place: Replaced) -> Effects:
        self._journalled.discard(place.spare)
        self._replaced[place.lost] = place
        return [place]

    def deadline_s(self) -> float:
        """When the next member that is away counts as lost, if a spare is there to take its place."""
        if not self._ready():
            return math.inf
        return min((self._lost_s(x) for x in self._absent()), default=math.inf)

    def _ready(self) -> list[Member]:
        return [x for x in self._known() if x.conn is not None and not x.leaving]

    def _known(self) -> list[Member]:
        """All spares of the roster, by id."""
        return [x for x in self._roster.present(sorted(self._journalled)) if x.standby]

    def _absent(self) -> Iterator[Member]:
        settled = (*self._replaced, *self._owed)
        return (x for x in self._roster.away() if not x.standby and x.incarnation_id not in settled)

    def _lost_s(self, member: Member) -> float:
        return member.lost_s + 2 * self._policy.derived.heartbeat_s

    # ------------------------------------------------------------ the end

    def unneeded(self) -> list[Member]:
        """Connected spares, when all others have left the job, one of them at its end, or were replaced."""
        if not self._finished or self._owed or any(self._absent()):
            return []
        if any(not x.standby for x in self._roster.connected()):
            return []
        return self._ready()
