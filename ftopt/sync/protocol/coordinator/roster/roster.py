"""The members, which of them are connected, and what each holds. STICKY: suspicion never shrinks the roster, only
*gone*."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Forgotten, SendTo
from ftopt.sync.protocol.coordinator.roster.horizon import KEPT, MovingHorizon
from ftopt.sync.protocol.coordinator.roster.speed import Speed
from ftopt.sync.protocol.policy import FaultPolicy

_MISSED = 3
"""Call-ins missed in a row after which a member is stalled in any state, such as compiling or evaluating."""
PAUSES = 20
"""The longest pause before a member or a pair of members is tried again, in units of ``dead_after_s``."""
SOURCES = 4
"""Holders of a state that are named to a fetching member at a time."""


def may_lack(saved: int, at: m.Position) -> bool:
    """Whether a checkpoint of version ``saved`` of fragment 0 may lack a fragment's version. A hello does not say which
    versions of the other fragments it has."""
    return at.version > (0 if at.fragment and saved >= 0 else saved)


@dataclass
class Member:
    """A known replica: its current incarnation, which is not gone.

    ``conn`` is None while it is away, since ``lost_s``, which increases while nobody is there. ``held``: its last known
    position in each fragment; no entry where that is unknown, or in doubt.
    """

    replica: str
    incarnation: int
    conn: int | None = None
    address: str = ""
    arithmetic: str = ""
    ended_by: str = ""  # the error that has ended its loop
    compared: bool = False  # differences in its training that may be on purpose were looked at
    """Digest of what its machine computes in a probe; "" where none is asked for."""
    state: str = "starting"
    inner_step: int = 0
    step_s: float = 0.0
    loss: float | str | None = None
    """From its last heartbeat: the mean over its last steps, or a word."""
    counts: m.Counts | None = None
    """The last counts of its life that it reported."""
    reported_s: float = 0.0  # when
    moved_s: float = -math.inf  # when it last took an inner step, fetched a version, or was done waiting for its peers
    heard_s: float = 0.0
    lost_s: float = 0.0
    hung_up: bool = False  # its last connection has ended, and has not merely fallen silent
    resumed: bool = False  # this connection is the first of a process that has resumed from a checkpoint
    leaving: bool = False
    finished: bool = False  # it has come to the end of its training, so that its leaving is no loss (LOSS)
    at_end: m.AtEnd | None = None  # its loop has ended, and it waits for the others' (END)
    waits_until_s: float = math.inf  # when that wait ends at the latest
    dismissed: bool = False  # it need not wait any more
    said_bye: bool = False  # it leaves as soon as another member holds what it holds
    early: bool = False  # it leaves before its part of the job is done
    standby: bool = False  # SPARE: it holds the state, and takes no part
    stalled_at: int | None = None  # its inner step when it missed a call-in; it counts as hung until that moves on
    stalled_until_s: float = -math.inf  # and until this time at least
    missed: int = 0  # call-ins that it has missed since it last proposed
    held: dict[int, m.Position] = field(default_factory=dict)
    maybe_fetched: dict[int, m.Position] = field(default_factory=dict)  # the last position that it was sent sources of
    in_doubt: bool = False  # it held a version, then reported that it lacks the next one: it may still hold the former
    newcomer: set[int] = field(default_factory=set)
    """Fragments in whose next round it is called in at the first proposal: it joined or came back late."""
    from_start: bool = False  # it was here when the job started at version 0
    catching_up: set[int] = field(default_factory=set)
    """Fragments that moved on while it fetched them: the next quorum waits for it, up to the grace."""
    busy_since_s: float | None = None
    """When an attempt with it ended without a report since that its reducer is free. None: it is free."""
    late: int = 0  # how often its peers gave up waiting for its result: each time makes them twice as patient
    quiet: int = 0  # the same on this connection, because its heartbeats had stopped
    load: int = 1  # units per step; with a global batch step_s is the time of one unit
    left: tuple[int, int] = (0, 0)
    """The plan of a global batch, and the number of units of its share not computed at its last heartbeat."""
    wants: int = 0  # units of the sample ledger that it wants to hold after a commit
    counted: dict[int, int] | None = None
    """Fragment -> the last version that may have a contribution of it; None: it was never welcomed."""
    continues_predecessor: bool = False  # it repeats the steps of its dead predecessor (ADOPT)
    called_in: dict[int, int] = field(default_factory=dict)  # fragment -> the version of its last call-in
    members_sent: dict[int, tuple[m.IncarnationId, ...]] = field(default_factory=dict)
    """Fragment -> the last member list sent on this connection."""
    speed: Speed = field(default_factory=Speed)

    @property
    def incarnation_id(self) -> m.IncarnationId:
        return (self.replica, self.incarnation)

    def lost_since(self, now: float) -> dict[str, Any]:
        """Data for the loss of its connection: also ``unreported``, the inner steps that it may have taken since its
        last report, at most at its usual speed."""
        steps = math.ceil((now - self.reported_s) / self.step_s) if self.counts is not None and self.step_s else None
        return self.counted_so_far | ({} if steps is None else {"unreported": steps})

    @property
    def counted_so_far(self) -> dict[str, Any]:
        """Data for the event of its end: ``counts``, if it has reported them."""
        return {"counts": asdict(self.counts)} if self.counts is not None else {}

    @property
    def stalled(self) -> bool:
        return self.stalled_at is not None

    @property
    def untrained(self) -> bool:
        """Whether it has joined and not taken a step yet, as far as is known."""
        return self.counted == {} and not self.step_s and not self.continues_predecessor

    def comes_to(self, fragment: int, version: int) -> None:
        """Notes that it holds or fetches a version: all that were here at the job's start begin version 0 together."""
        if version or not self.from_start:
            self.newcomer.add(fragment)

    def busy(self, now: float, patience_s: float) -> bool:
        """Whether its reducer has been busy with an ended attempt for so long that it counts as hung."""
        return self.busy_since_s is not None and now >= self.busy_since_s + patience_s

    def quiet_from_s(self, policy: FaultPolicy) -> float:
        """When its peers go on without it, if it keeps them waiting and stays silent: a heartbeat is missing, and the
        grace has passed or the next heartbeat is missing, too."""
        heartbeat_s = policy.derived.heartbeat_s
        return self.heard_s + (heartbeat_s + max(policy.grace_s, heartbeat_s)) * 2.0 ** min(self.quiet, 10)

    def may_hold(self, at: m.Position) -> bool:
        """Whether it holds ``at``, as far as is known: a fetch, or an absence, leaves that open."""
        f = at.fragment
        return at in (self.held.get(f), self.maybe_fetched.get(f)) or (self.conn is None and f not in self.held)

    def may_exceed(self, best: dict[int, int], saved: int = -1) -> bool:
        """Whether it may hold a version above ``best`` (fragment -> version) that a checkpoint of version ``saved``
        may lack; -1: there is none."""
        known = (*self.held.values(), *self.maybe_fetched.values())
        return any(p.version > best.get(p.fragment, -1) and may_lack(saved, p) for p in known)

    def patience_s(self) -> float:
        """Seconds that a call-in waits for it: two of its usual steps, half a second at least.

        Only a trainer at work is waited for, or one without units, which answers at once.
        """
        if self.state == "training":
            return max(0.5, 2 * self.step_s * self.load)
        return 0.5 if self.state == "out_of_units" else 0.0

    def miss(self, now: float, pause_s: float, *, at_work: bool, again: bool = False) -> bool:
        """Notes a missed call-in; returns whether the member counts as hung. A trainer ``at_work`` does at once, until
        it takes a step. Any member does after several in a row without a proposal, for ``pause_s`` at least, and twice
        as long after each further one, `PAUSES` times at most. ``again``: in the same round."""
        self.missed += not again
        often = self.missed - _MISSED
        if often < 0 and not at_work:
            return False
        self.stalled_at = self.inner_step
        self.stalled_until_s = now + pause_s * min(2.0**often, PAUSES) if often >= 0 else now
        return True

    def proposed(self) -> None:
        """Notes a proposal: the member does not count as hung."""
        self.stalled_at, self.missed = None, 0

    def progress(self, now: float, message: m.Heartbeat) -> bool:
        """Takes a heartbeat; returns whether the member, if stalled, moves again, has run out of units, or, if slow, is
        at work again and may be called in early."""
        if message.inner_step != self.inner_step:
            self.moved_s = now
        moves = (
            self.stalled
            and now >= self.stalled_until_s
            and (message.inner_step != self.stalled_at or message.state != "training")
        )
        if moves:
            self.stalled_at = None
        out_of_units = message.state == "out_of_units" != self.state
        at_work = self.speed.slow and message.state == "training" != self.state
        self.state, self.inner_step, self.step_s = message.state, message.inner_step, message.step_s
        self.left, self.loss = (message.plan, message.left), message.loss
        self.counts, self.reported_s = message.counts or self.counts, now
        return moves or out_of_units or at_work


def by_id(member: Member) -> str:
    """The sort key for the order of ids."""
    return member.replica


def send(members: Iterable[Member], message: m.FromCoordinator) -> Effects:
    """Sends a message to those of ``members`` that are connected."""
    return [SendTo(x.conn, message) for x in members if x.conn is not None]


class Roster:
    """All members by replica id, those that are connected, and the gone incarnations.

    ``changes``: counts members that come, go and are lost. ``kept_gone``: as in `MovingHorizon`.
    """

    def __init__(self, kept_gone: int = KEPT) -> None:
        self.members: dict[str, Member] = {}
        self.gone: dict[str, int] = {}
        """Replica -> newest gone incarnation that is not forgotten, in the order in which they went."""
        self.horizon = MovingHorizon(kept_gone, lambda x: self.current(x) is not None)
        self.changes = 0
        self._by_conn: OrderedDict[int, Member] = OrderedDict()
        """Connected members, the longest silent first."""
        self._away: OrderedDict[str, Member] = OrderedDict()
        """Members that are away, the longest away first."""
        self._holders: dict[int, Member] = {}
        """Fragment -> a member that was found to hold its current version."""
        self._by_id: list[Member] = []
        """Connected members, by id."""
        self._connected: tuple[Member, ...] | None = ()
        self._incarnation_ids: tuple[m.IncarnationId, ...] | None = None
        self._gone_ids: tuple[m.IncarnationId, ...] | None = None

    def attach(self, member: Member, conn: int, now: float) -> None:
        self.detach(member, now)
        member.conn, member.heard_s, member.members_sent, member.busy_since_s, member.quiet = conn, now, {}, None, 0
        member.hung_up = False
        self._by_conn[conn] = member
        self._away.pop(member.replica, None)
        bisect.insort(self._by_id, member, key=by_id)
        self._connected = None
        self.changes += 1

    def detach(self, member: Member, now: float) -> None:
        if member.conn is not None:
            self._by_conn.pop(member.conn, None)
            self._away[member.replica] = member
            del self._by_id[bisect.bisect_left(self._by_id, member.replica, key=by_id)]
            self._connected = None
            self.changes += 1
            member.conn, member.lost_s = None, now

    def missed_by_nobody(self, now: float) -> None:
        """Leaves out the time since the last member was lost: nobody was there, so it does not count as absence."""
        away = self.away()
        none_here_s = now - max((x.lost_s for x in away), default=now)
        for member in away:
            member.lost_s += none_here_s
        self.changes += 1

    def miss(self, member: Member, now: float) -> None:
        """Counts a member that is away as lost from now on."""
        if member.conn is None:
            member.lost_s = now
            self._away.move_to_end(member.replica)

    def hear(self, member: Member, now: float) -> None:
        """Notes a message of a connected member."""
        assert member.conn is not None
        member.heard_s = now
        self._by_conn.move_to_end(member.conn)

    def heard_s(self) -> float:
        """When the longest silent connected member was last heard; inf: none is connected."""
        return next(iter(self._by_conn.values())).heard_s if self._by_conn else math.inf

    def silent(self, now: float, silence_s: float) -> list[Member]:
        """Connected members that were not heard for ``silence_s``, by id."""
        silent = itertools.takewhile(lambda x: now >= x.heard_s + silence_s, self._by_conn.values())
        return sorted(silent, key=by_id)

    def by_conn(self, conn: int) -> Member | None:
        return self._by_conn.get(conn)

    def current(self, incarnation_id: m.IncarnationId) -> Member | None:
        """The member of that incarnation; None: it is gone, or unknown."""
        member = self.members.get(incarnation_id[0])
        return member if member is not None and member.incarnation == incarnation_id[1] else None

    def present(self, incarnation_ids: Iterable[m.IncarnationId]) -> list[Member]:
        """The members of these incarnations, without those that are gone or unknown."""
        return [x for x in map(self.current, incarnation_ids) if x is not None]

    def connected(self) -> tuple[Member, ...]:
        """Connected members, by id."""
        if self._connected is None:
            self._connected = tuple(self._by_id)
        return self._connected

    def training(self) -> list[Member]:
        """Connected members that are no spares, by id."""
        return [x for x in self.connected() if not x.standby]

    def away(self) -> list[Member]:
        """Members that are away, by id."""
        return [x for _, x in sorted(self._away.items())]

    def lost_s(self) -> float:
        """When the first member that is away was lost; inf: none is away."""
        return next(iter(self._away.values())).lost_s if self._away else math.inf

    def is_held(self, at: m.Position) -> bool:
        """Whether a connected member holds ``at``, or may hold it."""
        known = self._holders.get(at.fragment)
        if known is None or known.conn is None or not known.may_hold(at):
            known = next((x for x in self.connected() if x.may_hold(at)), None)
            if known is not None:
                self._holders[at.fragment] = known
        return known is not None

    def incarnation_ids(self) -> tuple[m.IncarnationId, ...]:
        """All members' incarnation ids, by id."""
        if self._incarnation_ids is None:
            self._incarnation_ids = tuple(sorted(x.incarnation_id for x in self.members.values()))
        return self._incarnation_ids

    def gone_ids(self) -> tuple[m.IncarnationId, ...]:
        if self._gone_ids is None:
            self._gone_ids = tuple(sorted(self.gone.items()))
        return self._gone_ids

    def is_gone(self, incarnation_id: m.IncarnationId) -> bool:
        return m.is_gone(incarnation_id, self.gone)

    def know(self, incarnation_id: m.IncarnationId, now: float) -> None:
        """Puts an incarnation on the roster, away at first; it is neither gone nor older than the one there."""
        replica, incarnation = incarnation_id
        self.members[replica] = Member(replica, incarnation, heard_s=now, lost_s=now)
        self._away.pop(replica, None)
        self._away[replica] = self.members[replica]
        self._incarnation_ids = None
        self.changes += 1

    def next_incarnation(self, replica: str) -> int:
        member = self.members.get(replica)
        known = member.incarnation if member else 0
        return max(known, self.gone.get(replica, 0), self.horizon.life) + 1

    def newest_life(self) -> int:
        """The latest life of all known incarnations."""
        here = (x.incarnation for x in self.members.values())
        return max(*here, *self.gone.values(), self.horizon.life, 0, 0)

    def forget(self, incarnation_id: m.IncarnationId, version: int) -> None:
        """Makes an incarnation, and all before it, gone, irrevocably. ``version``: fragment 0's newest."""
        replica, incarnation = incarnation_id
        self.gone[replica] = max(incarnation, self.gone.pop(replica, 0))
        self.horizon.note(replica, version)
        self._gone_ids = None
        self.changes += 1
        member = self.members.get(replica)
        if member is not None and self.is_gone(member.incarnation_id):
            self.detach(member, member.lost_s)
            del self.members[replica]
            self._away.pop(replica, None)
            self._incarnation_ids = None

    def forget_gone(self, at: m.Position, undropped: Callable[[str], bool], *, epoch: int) -> Forgotten | None:
        """HORIZON: forgets gone incarnations, and returns them; arguments as in `MovingHorizon.move`."""
        forgotten = self.horizon.move(at, self.gone, undropped, epoch=epoch)
        if forgotten is not None:
            self._gone_ids = None
        return forgotten

    def sources(self, at: m.Position, *, but: str, turn: int = 0) -> tuple[str, ...]:
        """Addresses of connected members that hold ``at`` (I5), `SOURCES` at most. Leavers are named only if there are
        no others: they will be gone soon, and may take the step of an agreed gradient at the rate of the step before.
        ``turn``: where in the circle of holders to begin, so that many joiners are spread over them."""
        holders = [x for x in self.connected() if x.held.get(at.fragment) == at and x.replica != but and x.address]
        staying = [x for x in holders if not x.leaving]
        found = staying or holders
        first = turn % len(found) if found else 0
        return tuple(x.address for x in (*found[first:], *found[:first])[:SOURCES])
