"""The phase before a job runs: hellos are kept and nothing is decided, until it is known what the truth is.

- WAIT: if a replica holds a version, until all on the roster are heard or gone, ``recovery_s`` at most (with a
  journal that knows as much as they do ``dead_after_s``: nothing that it knows can be reversed). A member that may hold
  more than those that were heard is waited for until it is gone (ROLLBACK).
- COLD: if none holds one, until all ``start_replicas`` are there, or ``start_s`` has passed; but not while members
  are unheard that may hold one.
- RESTORE: in the place of a cold start, if the job has had a state: those that have its newest checkpoint are to
  restore that.
"""

from __future__ import annotations

import math
from collections import Counter

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.effects import Close, Decided, Effects, JournalState, Rollback, SendTo
from ftopt.sync.protocol.coordinator.roster import Member, Roster
from ftopt.sync.protocol.coordinator.versions import Versions
from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.settings import Sync

_NEWS = 32
"""Of many that come, not each is announced to all the others: only when their number has grown by this part."""


class Startup:
    """Hellos, and what they say together with the journal (``saved``).

    ``lost``: the chain of fragment 0 that the job had before.
    """

    def __init__(self, roster: Roster, saved: JournalState | None = None, *, lost: str = "") -> None:
        self.hellos: dict[int, m.Hello] = {}
        self.sync = Sync()
        self.sent: set[str] = set()
        """RESTORE: replicas that were asked to restore a checkpoint."""
        self._roster = roster
        self._decided = saved.decided if saved else ()
        self._cursor = saved.cursor if saved else 0
        self.lost = lost or next((d.chain for d in reversed(self._decided) if not d.fragment), "")
        self._first_s: float | None = None

    # ------------------------------------------------------------ hellos

    def hear(self, now: float, conn: int, hello: m.Hello) -> Effects:
        """Keeps a hello; the newest of a replica counts."""
        self._first_s = now if self._first_s is None else self._first_s
        former = [number for number, other in self.hellos.items() if other.replica == hello.replica]
        for number in former:
            del self.hellos[number]
        self.hellos[conn] = hello
        hold, count = m.Hold(self.text(now)), len(self.hellos)
        notified = self.hellos if count % max(1, count // _NEWS) == 0 else (conn,)
        return [*map(Close, former), *(SendTo(number, hold) for number in notified)]

    def lose(self, conn: int) -> None:
        self.hellos.pop(conn, None)

    def outlived(self) -> list[tuple[int, m.Hello]]:
        """Takes out hellos of incarnations that another hello has reported as gone."""
        known = [(conn, h) for conn, h in self.hellos.items() if h.incarnation]
        gone = [(conn, h) for conn, h in known if self._roster.is_gone((h.replica, h.incarnation))]
        for conn, _ in gone:
            del self.hellos[conn]
        return gone

    def absent(self) -> list[Member]:
        """Members whose current incarnation is not here."""
        here = {(h.replica, h.incarnation) for h in self.hellos.values()}
        return [x for x in self._roster.away() if x.incarnation_id not in here]

    def state_holders(self) -> list[m.Hello]:
        """Hellos that hold a version of every fragment."""
        return [h for h in self.hellos.values() if len(h.positions) == h.fragments]

    def initial_source(self) -> int:
        """The connection whose state becomes version 0 at a cold start: the first by id, fresh ones before others."""
        return min(self.hellos, key=lambda conn: (not self.hellos[conn].initial, self.hellos[conn].replica))

    def restorers(self) -> list[tuple[int, m.Hello, m.Position]]:
        """RESTORE: those that can restore the newest checkpoint of this job; none while a replica holds a state.

        One that cannot read its newest checkpoint is among them: it finds out, and says so to its user.
        """
        if self.state_holders() or not self.lost:
            return []
        offers = [(conn, h, h.checkpoint) for conn, h in self.hellos.items() if h.checkpoint is not None]
        ours = [x for x in offers if not x[2].chain or m.same_start(x[2].chain, self.lost)]
        newest = max((at.version for _, _, at in ours), default=0)
        return [x for x in ours if x[2].version == newest or not x[2].chain]

    # ------------------------------------------------------------ when it ends

    def may_end(self, now: float) -> bool:
        """Whether the truth is known, or was waited for long enough."""
        if not self.hellos:
            return False
        unheard = self._unheard()
        if self._indispensable(unheard):
            return False
        if state_holders := self.state_holders():
            unknown = [x for x in unheard if len(x.held) < len(state_holders[0].positions)]
            return not unknown or now >= self.deadline_s()
        wanted = self.sync.start_replicas
        complete = not unheard and wanted is not None and len(self.hellos) >= wanted
        return complete or now >= self.deadline_s()

    def _indispensable(self, unheard: list[Member]) -> list[Member]:
        """Members that may hold what no hello reports; each is waited for until it is gone."""
        if state_holders := self.state_holders():
            best = dict(sorted((p.fragment, p.version) for h in state_holders for p in h.positions))
            return [x for x in unheard if x.may_exceed(best)]
        # With a journal it is known that there was a state: they may hold it.
        return [x for x in unheard if x.held or x.in_doubt or self._decided]

    def deadline_s(self) -> float:
        """When waiting ends at the latest, as far as is known."""
        if self._first_s is None:
            return math.inf
        if self.state_holders():
            return self._first_s + (self.sync.dead_after_s if self._up_to_date() else self.sync.derived.recovery_s)
        if self._unheard():
            return self._first_s + max(self.sync.start_s, self.sync.derived.recovery_s)
        return self._first_s + self.sync.start_s

    def text(self, now: float) -> str:
        if self._first_s is None:
            return "waiting for the first replica"
        left_s = max(0.0, self.deadline_s() - now)
        unheard = self._unheard()
        if awaited := self._indispensable(unheard):
            newer = "what it holds may be newer than all that is here; start it again, or wait for gone_after_s"
            return f"waiting for {_names(awaited)}: {newer}={self.sync.gone_after_s:g} s"
        if self.state_holders() or unheard:
            return f"recovering: waiting for {_names(unheard) or 'nobody'}, {left_s:.0f} s at most"
        here, wanted = len(self.hellos), self.sync.start_replicas
        if wanted is None:
            return f"{here} connected; the job starts in {left_s:.0f} s (set start_replicas to start at once)"
        if here >= wanted:
            return f"all {wanted} replicas are connected"
        return f"{here} of {wanted} replicas connected; the job starts in {left_s:.0f} s at most"

    def _up_to_date(self) -> bool:
        """Whether the journal knows all that was reported; else it is an old copy."""
        state_holders = self.state_holders()
        tops = {d.fragment: d.version for p in state_holders[0].positions for d in self.saved(p.fragment)}
        return all(tops.get(p.fragment, -1) >= p.version for h in state_holders for p in h.positions)

    def _unheard(self) -> list[Member]:
        """Members that may hold something that no hello reports."""
        newcomers = {h.replica for h in self.hellos.values() if not h.incarnation}
        return [x for x in self.absent() if x.replica not in newcomers]

    # ------------------------------------------------------------ the truth

    def saved(self, fragment: int) -> list[Decided]:
        """The journal's decisions of one fragment, oldest first; none if it is of another start of the job."""
        decided = [d for d in self._decided if d.fragment == fragment]
        chains = [p.chain for h in self.state_holders() for p in h.positions if p.fragment == fragment]
        known = not chains or any(m.same_start(chain, d.chain) for chain in chains for d in decided[-1:])
        return decided if known else []

    def restore(self, versions: Versions) -> Effects:
        """One fragment goes on from the highest version that the journal or a replica knows; returns what to journal.

        Of several branches the journal's is the truth; without a journal, that of most replicas.
        """
        f, saved = versions.fragment, self.saved(versions.fragment)
        reports = [(p, h.inner_step) for h in self.state_holders() for p in h.positions if p.fragment == f]
        top = max((p.version for p, _ in reports), default=-1)
        if saved and saved[-1].version >= top:
            versions.restore(saved[-1], saved)
            return []
        votes = Counter(p for p, _ in reports if p.version == top)
        at = min(votes, key=lambda p: (-votes[p], p.chain))
        inner_step = max(inner_step for p, inner_step in reports if p == at)
        done = () if f else next(h.done for h in self.hellos.values() if at in h.positions)
        found = Decided(f, top, 0, "", at.chain, inner_step, (), done)
        versions.restore(found, saved)
        return [Rollback(f, top - 1), found]

    def cold_start(self, versions: Versions, epoch: int) -> Effects:
        """COLD: version 0 is the state of one member, journalled like any decision."""
        f, source = versions.fragment, self.hellos[self.initial_source()]
        chain = m.first_chain(f, epoch, source.replica, source.initial)
        start = Decided(f, 0, 0, source.initial, chain, source.inner_step, (), () if f else source.done)
        versions.restore(start)
        return [Rollback(f, -1), start]

    def shares(self, at: m.Position) -> dict[m.IncarnationId, tuple[int, Ranges]]:
        """RESTART: plan and share of each holder of ``at``, as it has received them last."""
        return {
            (h.replica, h.incarnation): (h.plan, h.units)
            for h in self.hellos.values()
            if h.incarnation and at in h.positions and h.units
        }

    def cursor(self) -> int:
        """CURSOR: no unit from here on was granted, as far as the journal and the replicas know."""
        return max(self._cursor, *(h.cursor for h in self.hellos.values()))


def _names(members: list[Member]) -> str:
    return ", ".join(sorted(x.replica for x in members)[:5])
