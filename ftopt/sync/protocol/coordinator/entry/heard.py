"""Which processes are here in the startup phase, and which members are not.

All that each hello asks for is kept up to date as processes come and go, so that the ten-thousandth hello takes no
longer than the first.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, by_id


class Heard:
    """Hellos by connection, one per replica, and what follows from them together.

    ``came_s``: when each process that was not let in before came; for a rival that moves up, when its rival was lost.
    ``state_holders``: hellos that hold a version of every fragment. ``reports``: (epoch, positions) of these -> their
    number; nearly all report the same. ``let_in``: incarnations that were let in, according to the journal and to
    processes that were. ``trainers``: number of replicas that are no spares.
    """

    def __init__(self, roster: Roster, let_in: Iterable[m.IncarnationId]) -> None:
        self.hellos: dict[int, m.Hello] = {}
        self.conns: dict[str, int] = {}
        self.trainers = 0
        self.came_s: dict[int, float] = {}
        self.state_holders: dict[int, m.Hello] = {}
        self.reports = Counter[tuple[int, tuple[m.Position, ...]]]()
        self.let_in = set(let_in)
        self.doubtful: dict[int, tuple[str, float]] = {}
        """Connection -> replica, and since when, of processes that resume while the former process of their incarnation
        may live and hold more. That process is waited for, like other members that are not heard."""
        self._roster = roster
        self._ids: set[m.IncarnationId] = set()
        self._best: dict[int, int] | None = None
        self._changes = -1
        self._silent: list[Member] = []
        self._contested: dict[int, tuple[Member, float]] = {}
        self._lost: list[tuple[float, str]] = []

    # ------------------------------------------------------------ processes come and go

    def add(self, now: float, conn: int, hello: m.Hello) -> None:
        """Adds a process that is here."""
        self.hellos[conn], self.conns[hello.replica] = hello, conn
        self.trainers += not hello.standby
        self._ids.add((hello.replica, hello.incarnation))
        if not hello.was_let_in:
            self.came_s[conn] = now
            self._doubt(conn, hello)
        if len(hello.positions) == hello.fragments:
            self.state_holders[conn] = hello
            self._count(hello, 1)
        if self._changes == self._roster.changes:
            self._meet(conn, hello)

    def drop(self, conn: int) -> m.Hello | None:
        """Removes the process of a connection; returns its hello, if there was one."""
        self.came_s.pop(conn, None)
        self.doubtful.pop(conn, None)
        self._contested.pop(conn, None)
        hello = self.hellos.pop(conn, None)
        if hello is None:
            return None
        del self.conns[hello.replica]
        self.trainers -= not hello.standby
        self._ids.remove((hello.replica, hello.incarnation))
        if self.state_holders.pop(conn, None) is not None:
            self._count(hello, -1)
        member = self._roster.members.get(hello.replica)
        if member is not None and self._changes == self._roster.changes:
            at = bisect.bisect_left(self._silent, member.replica, key=by_id)
            if not any(x is member for x in self._silent[at : at + 1]):
                self._silent.insert(at, member)
                heapq.heappush(self._lost, (member.lost_s, member.replica))
        return hello

    def learn(self, incarnation_ids: Iterable[m.IncarnationId]) -> None:
        """Learns that these incarnations were let in, from a process that was."""
        before = len(self.let_in)
        self.let_in.update(incarnation_ids)
        if len(self.let_in) > before:
            self.doubtful.clear()
            for conn in self.came_s:
                self._doubt(conn, self.hellos[conn])

    def _doubt(self, conn: int, hello: m.Hello) -> None:
        if (hello.replica, hello.incarnation) in self.let_in:
            self.doubtful[conn] = (hello.replica, self.came_s[conn])

    def _count(self, hello: m.Hello, by: int) -> None:
        report = (hello.epoch, hello.positions)
        before, after = self.reports[report], self.reports[report] + by
        self.reports[report] = after
        if not after:
            del self.reports[report]
        if not before or not after:
            self._best = None

    # ------------------------------------------------------------ what they hold

    def best(self) -> dict[int, int]:
        """Fragment -> the highest version held; a new object when there is a new report."""
        if self._best is None:
            self._best = dict(sorted((p.fragment, p.version) for _, positions in self.reports for p in positions))
        return self._best

    # ------------------------------------------------------------ members that are not here

    def silent(self) -> Sequence[Member]:
        """Members with neither their current incarnation nor a newcomer under their id here; by id."""
        self._look()
        return self._silent

    def contested(self) -> Iterable[tuple[Member, float]]:
        """Members that are not heard but have a newcomer under their id here, and since when; the earliest first."""
        self._look()
        return self._contested.values()

    def lost_s(self) -> float:
        """When the first of all members not here was lost; inf: all are here."""
        self._look()
        while self._lost:
            lost_s, replica = self._lost[0]
            member = self._roster.members.get(replica)
            if member is not None and member.lost_s == lost_s and member.incarnation_id not in self._ids:
                return lost_s
            heapq.heappop(self._lost)
        return math.inf

    def _look(self) -> None:
        """Updates the lists if the roster has changed."""
        if self._changes == self._roster.changes:
            return
        self._changes = self._roster.changes
        self._silent = [x for x in self._roster.away() if x.incarnation_id not in self._ids]
        self._lost = [(x.lost_s, x.replica) for x in self._silent]
        heapq.heapify(self._lost)
        self._contested.clear()
        for conn in self.came_s:
            self._meet(conn, self.hellos[conn])

    def _meet(self, conn: int, hello: m.Hello) -> None:
        member = self._roster.members.get(hello.replica)
        if member is None or hello.incarnation not in (0, member.incarnation):
            return
        if not hello.incarnation:
            self._contested[conn] = (member, self.came_s[conn])
        at = bisect.bisect_left(self._silent, member.replica, key=by_id)
        if self._silent[at : at + 1] and self._silent[at] is member:
            del self._silent[at]
