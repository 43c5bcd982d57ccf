"""Members that lack the current version of a fragment, and when each is sent where to fetch it.

A member hears of a new version at once, and of sources as soon as there are any. After a fetch that failed at all
sources it is sent them again after a pause that grows to `PAUSE_S`, or as soon as there is another source: neither side
runs hot meanwhile.

Its training thread may have proposed, and wait for the result. It waits for a fetch for ``patience_s`` at most, and for
none that has failed or has no source.

A fetch goes on with the version that it began with. The next fetch is expected to take as long as the last one: that
says when a member that the version has overtaken will hold what it fetches now.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, SendTo
from ftopt.sync.protocol.coordinator.roster.roster import SOURCES, Member, Roster

PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """Of a fetch under way: when it ends if it takes as long as the one before, and if it takes twice as long."""

    usual_s: float
    latest_s: float


@dataclass
class _Lack:
    """``notified``: the version that it was sent last. ``sourced``: with sources, so that it will answer. ``sources``:
    the last that it was sent. ``since_s``: when the fetch under way began. ``release_s``: from when on its training
    thread does not wait; ``released``: it was told so. ``turn``: with which holder its sources begin."""

    heal: bool
    turn: int
    notified: m.Position | None = None
    sourced: bool = False
    sources: tuple[str, ...] = ()
    failures: int = 0
    due_s: float = 0.0
    since_s: float | None = None
    release_s: float | None = None
    released: bool = False


class CatchUp:
    """One fragment's members that are to fetch it."""

    def __init__(self, fragment: int, roster: Roster, *, patience_s: float) -> None:
        self.fragment = fragment
        self._roster, self._patience_s = roster, patience_s
        self._lacks: dict[str, _Lack] = {}
        self._turn = fragment
        self._at: m.Position | None = None
        """What was current at the last look at all of them; later each step looks at those of `_news`, those without
        sources, and those whose time to be released has come."""
        self._news: set[str] = set()
        self._unsourced: set[str] = set()
        self._releases: list[tuple[float, str]] = []
        """A heap, with some that are released by now."""
        self._took_s: dict[str, float] = {}
        """How long the last fetch took that was complete, on this connection."""

    def add(self, replica: str, *, heal: bool = False) -> None:
        """A member lacks the current version. ``heal``: although it may hold one of that number."""
        if heal or replica not in self._lacks:
            self._lacks[replica] = self._lack(heal=heal)
            self._unsourced.add(replica)

    def _lack(self, *, heal: bool) -> _Lack:
        """Many may come at once: each is sent to other sources first."""
        self._turn += 1
        return _Lack(heal, self._turn - 1)

    def failed(self, now: float, replica: str) -> None:
        lack = self._lacks.setdefault(replica, self._lack(heal=False))
        lack.sourced, lack.since_s = False, None
        self._unsourced.add(replica)
        lack.failures += 1
        lack.due_s = now + min(PAUSE_S, 0.05 * 2 ** min(lack.failures, 10))
        lack.release_s = now

    def proposed(self, replica: str) -> None:
        """A member that lacks the current version has proposed, in vain: it is told not to wait."""
        self.add(replica)
        self._lacks[replica].released = False
        self._news.add(replica)

    def fetched(self, now: float, replica: str) -> None:
        """A member has fetched a version; if it needs another one by now, it goes on with that."""
        lack = self._lacks.get(replica)
        if lack is not None and lack.since_s is not None:
            self._took_s[replica] = now - lack.since_s
            lack.since_s = now if lack.sourced else None
        self._news.add(replica)

    def since_s(self, replica: str) -> float | None:
        """When the fetch began that is under way; None: none is."""
        lack = self._lacks.get(replica)
        return lack.since_s if lack is not None else None

    def arrival(self, replica: str) -> Arrival | None:
        """When a member will hold what it fetches, if that is known."""
        lack, took_s = self._lacks.get(replica), self._took_s.get(replica)
        if lack is None or lack.since_s is None or took_s is None:
            return None
        return Arrival(lack.since_s + took_s, lack.since_s + 2 * took_s)

    def drop(self, replica: str) -> None:
        self._lacks.pop(replica, None)
        self._unsourced.discard(replica)
        self._took_s.pop(replica, None)

    def step(self, now: float, at: m.Position) -> Effects:
        effects: Effects = []
        for replica in self._due(now, at):
            lack, member = self._lacks[replica], self._roster.members.get(replica)
            # One that is dismissed goes with the version that it was dismissed with, as the others at their end do.
            if member is None or member.conn is None or member.dismissed or member.held.get(self.fragment) == at:
                del self._lacks[replica]
                self._unsourced.discard(replica)
                continue
            effects += self._notify(now, member, lack, at)
            (self._unsourced.discard if lack.sourced else self._unsourced.add)(replica)
            if not lack.released and now >= self._release_s(now, lack):
                lack.released = True
                effects.append(SendTo(member.conn, m.TrainOn(self.fragment)))
            elif not lack.released and lack.release_s is not None:
                heapq.heappush(self._releases, (lack.release_s, replica))
        return effects

    def _due(self, now: float, at: m.Position) -> list[str]:
        """Those for whom there may be something to do, by id."""
        found = self._lacks.keys() if at != self._at else self._news | self._unsourced
        due = set(found)
        while self._releases and self._releases[0][0] <= now:
            due.add(heapq.heappop(self._releases)[1])
        self._at, self._news = at, set()
        return sorted(x for x in due if x in self._lacks)

    def _notify(self, now: float, member: Member, lack: _Lack, at: m.Position) -> Effects:
        """Sends a member what it is to fetch, and where from, if that is news or due."""
        assert member.conn is not None
        news = lack.notified != at
        if lack.sourced and not news:
            return []
        tried = lack.failures if now >= lack.due_s else lack.failures - 1  # after the pause those not named so far
        sources = self._roster.sources(at, but=member.replica, turn=lack.turn + SOURCES * tried)
        if not news and (not sources or (now < lack.due_s and set(sources) <= set(lack.sources))):
            return []
        lack.notified, lack.sourced = at, bool(sources)
        if sources:
            member.maybe_fetched[self.fragment] = at
            lack.since_s, lack.sources = now if lack.since_s is None else lack.since_s, sources
        if not member.continues_predecessor or member.counted:  # as far as its predecessor was: no latecomer
            member.newcomer.add(self.fragment)
        return [SendTo(member.conn, m.Behind(at, sources, lack.heal))]

    def _release_s(self, now: float, lack: _Lack) -> float:
        """From when on the training thread of a member does not wait for its fetch."""
        if lack.release_s is None:
            lack.release_s = now + self._patience_s
        return lack.release_s if lack.sourced else now

    def deadline_s(self, now: float) -> float:
        while self._releases and not self._waits(*self._releases[0]):
            heapq.heappop(self._releases)
        due = [self._lacks[x].due_s for x in self._unsourced]
        due += [release_s for release_s, _ in self._releases[:1]]
        return min((x for x in due if x > now), default=math.inf)

    def _waits(self, release_s: float, replica: str) -> bool:
        """Whether the training thread of a member is to be released then."""
        lack = self._lacks.get(replica)
        return lack is not None and not lack.released and lack.release_s == release_s
