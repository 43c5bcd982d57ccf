"""Members that lack the current version of a fragment, and when each is sent where to fetch it.

A member hears of a new version at once, and of sources as soon as there are any. If a fetch fails at all sources, the
member is sent them again after a pause that grows to `PAUSE_S`, or as soon as there is another source, so that neither
side busy-waits.

Its training thread may wait for the result of a proposal. It waits for a fetch for ``patience_s`` at most, and not for
a fetch that has failed or has no source.

A fetch continues with the version with which it began. It is expected to take as long as the member's last fetch, which
tells when a member that the version has overtaken will hold the version that it fetches.
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
    """When a fetch under way ends if it takes as long as the one before, and if it takes twice as long."""

    usual_s: float
    latest_s: float


@dataclass
class _Lack:
    """A member that lacks the version. ``notified``: the version that it was last sent. ``sourced``: with sources, so
    that it will answer. ``sources``: the last that it was sent. ``since_s``: when the fetch under way began.
    ``release_s``: from when on its training thread does not wait; ``released``: it was told so. ``turn``: the holder
    with which its sources begin."""

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
        """The current position at the last look at all members. Until it changes, steps look only at members in `_news`
        or without sources, and at those to be released."""
        self._news: set[str] = set()
        self._unsourced: set[str] = set()
        self._releases: list[tuple[float, str]] = []
        """A heap of (release time, replica); some may have been released already."""
        self._took_s: dict[str, float] = {}
        """Replica -> seconds that its last complete fetch on this connection took."""

    def add(self, replica: str, *, heal: bool = False) -> None:
        """Notes that a member lacks the current version. ``heal``: although it may hold a version of that number."""
        if heal or replica not in self._lacks:
            self._lacks[replica] = self._lack(heal=heal)
            self._unsourced.add(replica)

    def _lack(self, *, heal: bool) -> _Lack:
        """A new entry. Of many members that come at once, each is sent to other sources first."""
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
        """Tells a member that lacks the current version, and has proposed nevertheless, not to wait."""
        self.add(replica)
        self._lacks[replica].released = False
        self._news.add(replica)

    def fetched(self, now: float, replica: str) -> None:
        """Notes that a member has fetched a version; if there is a newer one, it fetches that next."""
        lack = self._lacks.get(replica)
        if lack is not None and lack.since_s is not None:
            self._took_s[replica] = now - lack.since_s
            lack.since_s = now if lack.sourced else None
        self._news.add(replica)

    def since_s(self, replica: str) -> float | None:
        """When the fetch under way began; None: there is none."""
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
            # A dismissed member leaves with the version with which it was dismissed, like the others at their end.
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
        """Replicas for which there may be something to do, by id."""
        found = self._lacks.keys() if at != self._at else self._news | self._unsourced
        due = set(found)
        while self._releases and self._releases[0][0] <= now:
            due.add(heapq.heappop(self._releases)[1])
        self._at, self._news = at, set()
        return sorted(x for x in due if x in self._lacks)

    def _notify(self, now: float, member: Member, lack: _Lack, at: m.Position) -> Effects:
        """Sends a member the position to fetch, and its sources, if that is news or due."""
        assert member.conn is not None
        news = lack.notified != at
        if lack.sourced and not news:
            return []
        tried = lack.failures if now >= lack.due_s else lack.failures - 1  # after the pause, sources not named so far
        sources = self._roster.sources(at, but=member.replica, turn=lack.turn + SOURCES * tried)
        if not news and (not sources or (now < lack.due_s and set(sources) <= set(lack.sources))):
            return []
        lack.notified, lack.sourced = at, bool(sources)
        if sources:
            member.maybe_fetched[self.fragment] = at
            lack.since_s, lack.sources = now if lack.since_s is None else lack.since_s, sources
        if not member.continues_predecessor or member.counted:  # else it is as far as its predecessor was
            member.comes_to(self.fragment, at.version)
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
        """Whether the training thread of a member is to be released at ``release_s``."""
        lack = self._lacks.get(replica)
        return lack is not None and not lack.released and lack.release_s == release_s
