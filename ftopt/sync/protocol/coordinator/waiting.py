"""Members that a round still waits for: grace, call-in, trainers that hang, and members that still fetch (step 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.catch_up import Arrival
from ftopt.sync.protocol.coordinator.effects import Effects, Emit
from ftopt.sync.protocol.coordinator.roster import Member, Roster, send
from ftopt.sync.protocol.coordinator.versions import Versions
from ftopt.sync.protocol.settings import Sync

PATIENCE_S = 0.5
"""Newcomers have at least so long from when they hold the version, and leavers to hand in with others that leave."""

STILL_S = 0.1
"""For a fetch alone nobody stands still for longer."""


class Waiting:
    """The patience of one round of one fragment."""

    def __init__(self, versions: Versions, roster: Roster, sync: Sync) -> None:
        self._versions, self._roster = versions, roster
        self._fragment = versions.fragment
        self._grace_s = sync.grace_s
        self._enough = sync.min_replicas
        self._late_s = math.inf
        self._deadline: dict[str, float] = {}
        self.close()

    def close(self) -> None:
        """No proposal is left: the next one opens the round."""
        self._opened_s: float | None = None
        self._quorate_s: float | None = None
        self._last_s: float | None = None
        self._hurried = False
        self._asked: set[str] = set()
        self._witness: Member | None = None
        self._arrival_s = math.inf
        self._alone_s: float | None = None
        self.awaited: tuple[str, ...] = ()
        """Members that fetch, if they alone are missing, and for a while: the others need not stand still."""

    def forget(self, replica: str) -> None:
        """A member is away; when it is back it is called in anew."""
        self._deadline.pop(replica, None)
        self._asked.discard(replica)

    def hurry(self) -> None:
        """A trigger means now: all are called in at once, and have as much time as usual."""
        self._hurried = True

    @property
    def quorum_s(self) -> float:
        """How long it took from the first proposal until enough had proposed; 0 while they have not."""
        return self._quorate_s - self._opened_s if self._quorate_s is not None and self._opened_s is not None else 0.0

    def step(
        self, now: float, proposers: list[Member], *, grace_s: float, arrival: Callable[[str], Arrival | None]
    ) -> Effects | None:
        """What is to be sent; None once the quorum need not wait any more.

        ``grace_s`` counts from when ``min_replicas`` have proposed. Those at work are called in then, or when the job's
        own grace has passed since the first proposal. ``arrival``: when a member that the version has overtaken will
        hold it; None: it is waited for within the grace.
        """
        version, holds = self._versions.at.version + 1, self._versions.held_by
        proposed = {x.replica for x in proposers}
        if self._opened_s is None and not all(x.leaving for x in proposers):
            self._opened_s = now
        missing = [x for x in self._roster.connected() if self._awaited(x, proposed)]
        if self._opened_s is None:  # leavers alone wait for a round, unless nobody is left to open one
            return [] if missing or self._leave_together(now, proposed) else None
        effects: Effects = []
        called: list[Member] = []
        for x in missing:
            if self._hurried and x.replica not in self._asked and holds(x):
                self._asked.add(x.replica)
                effects += self._call_in(x, version)
        if self._quorate_s is None and len(proposers) >= self._enough:
            self._quorate_s = now
        soonest_s = math.inf if self._quorate_s is None else self._quorate_s + grace_s
        self._late_s = min(self._opened_s + self._grace_s, soonest_s)
        late = now >= self._late_s
        fetching = [x for x in missing if not holds(x)]
        for x in (x for x in missing if holds(x)):
            out_of_units = x.state == "out_of_units" and x.called_in.get(self._fragment) != version
            newcomer = self._fragment in x.newcomer
            if out_of_units or (x.replica not in self._deadline and (late or newcomer)):
                self._deadline[x.replica] = now + max(x.patience_s(), PATIENCE_S if newcomer else 0.0)
                effects += self._call_in(x, version)
                called.append(x)
        waited_for = (x for x in reversed(missing) if holds(x) and now < self._deadline.get(x.replica, math.inf))
        self._witness = next(waited_for, None)
        self._await_fetches(now, {x.replica: arrival(x.replica) for x in fetching})
        if self._witness is None and not now < self._arrival_s:
            return None
        for member in called:
            member.called_in[self._fragment] = version
        return effects

    def _await_fetches(self, now: float, arrivals: dict[str, Arrival | None]) -> None:
        """Until when the round waits for those that fetch: the grace, or longer where the duration is known."""
        latest = {r: self._late_s if x is None else max(self._late_s, x.latest_s) for r, x in arrivals.items()}
        self._arrival_s = max((x for x in latest.values() if now < x), default=-math.inf)
        alone = self._witness is None and now < self._arrival_s
        self._alone_s = (now if self._alone_s is None else self._alone_s) if alone else None
        known = [x for x in arrivals.values() if x is not None]
        slow = now >= self._still_s() or any(x.usual_s > now + STILL_S for x in known)
        self.awaited = tuple(r for r in latest if now < latest[r]) if alone and known and slow else ()

    def _still_s(self) -> float:
        """When the others need not stand still any more for a fetch."""
        return math.inf if self._alone_s is None else self._alone_s + STILL_S

    def goes_on(self, now: float, proposed: Collection[str]) -> bool:
        """Whether `step` would find the round as it left it but for one more proposal: it still waits for one of those
        that it waited for, and nothing is to be sent."""
        x = self._witness
        if x is None or x.conn is None or now >= min(self._late_s, self._deadline.get(x.replica, math.inf)):
            return False
        counts_alike = self._quorate_s is not None or len(proposed) < self._enough
        return counts_alike and self._awaited(x, proposed)

    def _leave_together(self, now: float, proposed: Container[str]) -> bool:
        """Whether the last round, of leavers alone, waits for other leavers to propose their remaining steps."""
        self._last_s = now if self._last_s is None else self._last_s
        others = (x for x in self._roster.connected() if x.leaving and not x.said_bye and x.replica not in proposed)
        return now < self._last_s + PATIENCE_S and any(map(self._versions.held_by, others))

    def hung(self, proposed: Container[str]) -> list[Member]:
        """Trainers at work that have let their call-in pass."""
        awaited = (x for x in self._roster.connected() if self._awaited(x, proposed) and self._versions.held_by(x))
        return [x for x in awaited if x.state == "training" and self._fragment not in x.newcomer]

    def _call_in(self, member: Member, version: int) -> Effects:
        """Asks for a contribution at the next step boundary."""
        event = Emit("call_in", *member.incarnation_id, self._fragment, version)
        return [*send([member], m.CallIn(self._fragment, version)), event]

    def deadline_s(self, now: float, proposed: Container[str]) -> float:
        due = [t for replica, t in self._deadline.items() if replica not in proposed]
        if self._opened_s is not None:
            due += [self._late_s, self._arrival_s, self._still_s()]
        elif self._last_s is not None:
            due.append(self._last_s + PATIENCE_S)
        return min((t for t in due if t > now), default=math.inf)

    def _awaited(self, member: Member, proposed: Container[str]) -> bool:
        if member.replica in proposed:
            return False
        if self._versions.held_by(member):
            return not member.leaving and not member.stalled
        return self._fragment in member.catching_up
