"""The end of a job by its loops: replicas that come to it together go with one version (END).

A replica whose loop has ended hands in its last steps, says `AtEnd`, and stays: it takes part in no round, and fetches
each newer version. It waits for others that come to their end: those that hand in their last steps, that join, or whose
inner steps show that their loops end within its patience. It does not wait for replicas that train on beyond the inner
step at which it has ended. When they wait for nobody, and hold the newest version, all get `End`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.members.members import Members
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit
from ftopt.sync.protocol.coordinator.roster.roster import Member, send
from ftopt.sync.protocol.policy import FaultPolicy

_BACK_S = 2.0
"""Seconds to wait after a connection has ended: a living process connects again within one."""
_SAID_AFTER_S = 0.5
"""Seconds after which a wait is logged."""


class Ending:
    """The members at the end of their loops, the members they wait for, and the version with which each has ended."""

    def __init__(self, members: Members) -> None:
        self._members, self._roster = members, members.roster
        self._left_with: dict[str, tuple[m.Position, ...]] = {}
        self._stopped: m.JobStopped | None = None
        self._told: set[int] = set()
        """Connections on which `JobStopped` was sent."""
        self._clear()

    def _clear(self) -> None:
        """Starts afresh, since nobody waits."""
        self._waiting: dict[str, Member] = {}
        self._last, self._patience_s, self._apart = 0, 0.0, set[str]()
        self._beyond: dict[str, int] = {}
        """Replica -> its inner step when this was first seen beyond the inner step of the waiting members."""
        self._witness = ""
        """A replica awaited at the last look; while it is, the others need no look: n replicas must not take n * n."""
        self._since_s = self._due_s = math.inf
        self._said: set[str] = set()

    def forget(self) -> None:
        """Forgets who has ended, since the job begins again. If the job is stopped, its replicas say so again."""
        self._left_with.clear()
        self._stopped = None
        self._told.clear()

    def stop(self, member: Member, message: m.StopJob) -> Effects:
        """Stops all loops; the first reason counts."""
        if self._stopped is not None:
            return []
        self._stopped = m.JobStopped(message.reason, message.replica)
        return [Emit("stop", *member.incarnation_id, data={"reason": message.reason, "by": message.replica})]

    def tell_stop(self) -> Effects:
        """Sends `JobStopped` to connected members that do not have it."""
        if self._stopped is None:
            return []
        news = [x for x in self._roster.connected() if x.conn is not None and x.conn not in self._told]
        self._told.update(x.conn for x in news if x.conn is not None)
        return send(news, self._stopped)

    def reached(self, now: float, member: Member, message: m.AtEnd, policy: FaultPolicy) -> None:
        """Notes that a member has ended. It waits at most as long as a round with a call-in takes, or two
        usual rounds if that is longer."""
        usual_s = max((r.gather.round_s for r in self._members.rounds), default=0.0)
        patience_s = min(message.wait_s, max(policy.grace_s + policy.dead_after_s, 2 * usual_s))
        member.at_end, member.dismissed, member.waits_until_s = message, False, now + patience_s
        self._waiting[member.replica] = member
        self._last, self._patience_s = max(self._last, message.inner_step), max(self._patience_s, patience_s)
        self._apart.update(message.but)
        self._since_s = min(self._since_s, now)
        self._due_s = min(self._due_s, member.waits_until_s, self._since_s + _SAID_AFTER_S)
        self._left_with.pop(member.replica, None)

    def step(self, now: float, policy: FaultPolicy) -> Effects:
        """Dismisses members that need not wait, or have waited long enough."""
        if not self._waiting or (now < self._due_s and self._keeps_waiting(now, self._witness, policy)):
            return []
        here = self._here()
        if not here:
            self._clear()
            return []
        awaited = [x for name, x in sorted(self._roster.members.items()) if self._comes(now, x, policy)]
        lacking = [x for x in here if self._lacks(x)]
        self._witness = (awaited or lacking or here)[0].replica
        if not awaited and not lacking:
            return self._dismiss(here, [])
        late = [x for x in here if now >= x.waits_until_s]
        rest = [x for x in here if now < x.waits_until_s]
        effects = self._dismiss(late, awaited) if late else []
        said_s = self._since_s + _SAID_AFTER_S
        if now >= said_s:
            effects += self._say(now, rest, awaited)
        self._due_s = min((x.waits_until_s for x in rest), default=math.inf)
        self._due_s = min(self._due_s, said_s) if now < said_s else self._due_s
        return effects

    def next_s(self, after: float, policy: FaultPolicy) -> float:
        """When to look again, since heartbeats alone make no look. ``after``: the time of the last look."""
        return max(after + 0.01, min(self._due_s, after + policy.derived.heartbeat_s)) if self._waiting else math.inf

    def _here(self) -> list[Member]:
        known = [x for name, x in sorted(self._waiting.items()) if self._roster.members.get(name) is x]
        self._waiting = {x.replica: x for x in known if x.at_end is not None and not x.said_bye}
        return [x for x in self._waiting.values() if x.conn is not None]

    def _keeps_waiting(self, now: float, replica: str, policy: FaultPolicy) -> bool:
        x = self._roster.members.get(replica)
        if x is None:
            return False
        return self._lacks(x) if x.at_end is not None and x.conn is not None else self._comes(now, x, policy)

    def _lacks(self, x: Member) -> bool:
        """Whether a member lacks the newest version, or may have a contribution in the next one."""
        rounds = self._members.rounds
        offers = any(x.replica in r.gather.proposals for r in rounds)
        under_way = any(r.attempt is not None and x.incarnation_id in r.attempt.members for r in rounds)
        return offers or under_way or not all(r.versions.held_by(x) for r in rounds)

    def _comes(self, now: float, x: Member, policy: FaultPolicy) -> bool:
        """Whether a member is on its way to the inner step at which others have ended."""
        if x.standby or x.said_bye or x.dismissed or x.at_end is not None or x.replica in self._apart:
            return False
        if x.conn is None and now >= x.lost_s + (
            min(_BACK_S, policy.dead_after_s) if x.hung_up else policy.dead_after_s
        ):
            return False
        if x.leaving:  # it hands in its last steps
            return True
        if x.finished:
            return False
        if self._stopped is not None:
            return True
        if x.inner_step > self._last:  # its loop may just have ended, with more steps than the others had
            return self._beyond.setdefault(x.replica, x.inner_step) == x.inner_step
        self._beyond.pop(x.replica, None)
        if x.state == "out_of_units" and not self._members.assignment.ended:  # it waits for units that they hold
            return False
        return (self._last - x.inner_step) * x.step_s * x.load < self._patience_s

    def _dismiss(self, leavers: Sequence[Member], awaited: Sequence[Member]) -> Effects:
        """Sends `End` to members that need not wait any longer; ``awaited``: members that did not come in time."""
        rounds = self._members.rounds
        for x in leavers:
            x.at_end, x.dismissed = None, True
            self._left_with[x.replica] = tuple(x.held[r.fragment] for r in rounds if r.fragment in x.held)
        effects: Effects = []
        late = tuple(x.replica for x in awaited)
        whole = not any(map(self._lacks, leavers))
        for x in leavers:
            own = self._left_with[x.replica]
            alike = tuple(sorted(name for name, held in self._left_with.items() if held == own))
            differ = tuple(sorted(self._left_with.keys() - set(alike)))
            effects += send([x], m.End(own, alike, differ, late, whole))
        identical = len(set(self._left_with.values())) == 1
        data = {"replicas": sorted(self._left_with), "identical": identical, "awaited": list(late)}
        return [*effects, Emit("final", version=rounds[0].at.version, data=data)]

    def _say(self, now: float, waiting: Sequence[Member], awaited: Sequence[Member]) -> Effects:
        """Tells each waiting member once for whom it waits."""
        effects: Effects = []
        for x in waiting:
            if x.replica in self._said:
                continue
            self._said.add(x.replica)
            names = ", ".join(f"{y.replica} (inner step {y.inner_step})" for y in awaited[:5]) or "the newest version"
            left_s = x.waits_until_s - now
            text = f"its loop has ended; it waits for {names}, {left_s:.1f} s at most, to end with the same version"
            effects += send([x], m.Hold(text))
        return effects
