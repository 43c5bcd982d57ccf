"""Which members a round still waits for: grace, call-in, slow members, hung trainers, and members that still fetch
(step 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, send
from ftopt.sync.protocol.coordinator.rounds.catch_up import Arrival
from ftopt.sync.protocol.coordinator.rounds.speeds import Rhythm, Speeds
from ftopt.sync.protocol.coordinator.rounds.versions import Versions
from ftopt.sync.protocol.policy import FaultPolicy

PATIENCE_S = 0.5
"""Least seconds that newcomers have from when they hold the version, and leavers to propose with other leavers."""

LONG = 0.05
"""A round counts as having waited for a member if the wait took at least this share of it."""

STILL_S = 0.1
"""The most seconds that the others wait for a fetch alone."""


class Waiting:
    """The patience of one round of one fragment.

    ``rhythm``: when the others are expected, if slow members are called in early; None: slow members are waited for
    like the others. ``began_s``: when the round began; None: not directly after the round before.
    """

    def __init__(
        self,
        versions: Versions,
        roster: Roster,
        policy: FaultPolicy,
        *,
        speeds: Speeds,
        rhythm: Rhythm | None = None,
        began_s: float | None = None,
    ) -> None:
        self._versions, self._roster = versions, roster
        self._fragment = versions.fragment
        self._grace_s = policy.grace_s
        self._enough = policy.min_replicas
        self._late_s = math.inf
        self._deadline: dict[str, float] = {}
        self._speeds, self._rhythm, self._began_s = speeds, rhythm, began_s
        self._called_s: dict[str, float] = {}
        """Replica -> when it was called in, which tells how long a slow member is waited for."""
        self.round_s = 0.0
        """Seconds from the round's beginning until it was opened; 0 while unknown."""
        self.close()

    def close(self) -> None:
        """Closes the round, since no proposal is left: the next one opens it."""
        self._opened_s: float | None = None
        self._quorate_s: float | None = None
        self._half_s: float | None = None
        self._last_s: float | None = None
        self._hurried = False
        self._asked: set[str] = set()
        self._was_late = False
        self._count = 0
        """Number of members at the last look: those that had proposed, and those awaited."""
        self._witness: Member | None = None
        self.last = ""
        """The member for which the round has waited last; "" for none."""
        self._arrival_s = math.inf
        self._alone_s: float | None = None
        self.awaited: tuple[str, ...] = ()
        """Members that fetch, if they alone have been missing for a while, so that the others need not wait."""

    def forget(self, replica: str) -> None:
        """Forgets a member that is away; when it is back it is called in again."""
        self._deadline.pop(replica, None)
        self._called_s.pop(replica, None)
        self._asked.discard(replica)

    def hurry(self) -> None:
        """Calls in all members at once, since a proposal has `now`; they have as much time as usual."""
        self._hurried = True

    @property
    def quorum_s(self) -> float:
        """Seconds from the first proposal until enough had proposed; 0 while they have not."""
        return self._quorate_s - self._opened_s if self._quorate_s is not None and self._opened_s is not None else 0.0

    def step(
        self, now: float, proposers: list[Member], *, grace_s: float, arrival: Callable[[str], Arrival | None]
    ) -> Effects | None:
        """Returns the effects; None once the quorum need not wait any more.

        ``grace_s`` counts from when ``min_replicas`` have proposed. Members at work are called in after it, or after
        the job's own grace since the first proposal. ``arrival``: when a member that the version has overtaken will
        hold it; None: it is waited for within the grace.
        """
        version, holds = self._versions.at.version + 1, self._versions.held_by
        proposed = {x.replica for x in proposers}
        missing = [x for x in self._roster.connected() if self._awaited(x, proposed)]
        if self._opened_s is None and self._begins(now, proposers, missing):
            self._open(now)
        if self._opened_s is None:  # leavers and slow members alone wait for a round, unless nobody else can open one
            self.last = missing[-1].replica if missing else self.last
            return [] if missing or self._leave_together(now, proposed) else None
        self._watch(now, proposed, missing)
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
        late = self._was_late = now >= self._late_s
        fetching = [x for x in missing if not holds(x)]
        for x in (x for x in missing if holds(x)):
            out_of_units = x.state == "out_of_units" and x.called_in.get(self._fragment) != version
            newcomer = self._fragment in x.newcomer
            if self._is_slow(x) and not out_of_units:
                effects += self._call_early(now, x)
                if x.replica not in self._deadline and self._quorate_s is not None:
                    self._deadline[x.replica] = self._slow_deadline_s(now, x)
                continue
            if out_of_units or (x.replica not in self._deadline and (late or newcomer)):
                self._deadline[x.replica] = now + max(x.patience_s(), PATIENCE_S if newcomer else 0.0)
                effects += self._call_in(x, version)
                called.append(x)
                self._called_s[x.replica] = now  # a slow member is not called in once more, early
        waited_for = (x for x in reversed(missing) if holds(x) and now < self._deadline.get(x.replica, math.inf))
        self._witness = next(waited_for, None)
        self._await_fetches(now, {x.replica: arrival(x.replica) for x in fetching})
        if self._witness is None and not now < self._arrival_s:
            return None
        self.last = (self._witness or fetching[-1]).replica
        for member in called:
            member.called_in[self._fragment] = version
        return effects

    def _await_fetches(self, now: float, arrivals: dict[str, Arrival | None]) -> None:
        """Sets until when the round waits for members that fetch: the grace, or longer if the duration is known."""
        latest = {r: self._late_s if x is None else max(self._late_s, x.latest_s) for r, x in arrivals.items()}
        self._arrival_s = max((x for x in latest.values() if now < x), default=-math.inf)
        alone = self._witness is None and now < self._arrival_s
        self._alone_s = (now if self._alone_s is None else self._alone_s) if alone else None
        known = [x for x in arrivals.values() if x is not None]
        slow = now >= self._still_s() or any(x.usual_s > now + STILL_S for x in known)
        self.awaited = tuple(r for r in latest if now < latest[r]) if alone and known and slow else ()

    def _still_s(self) -> float:
        """When the others need not wait for a fetch any more."""
        return math.inf if self._alone_s is None else self._alone_s + STILL_S

    def goes_on(self, now: float, proposed: Collection[str]) -> bool:
        """Whether `step` would change nothing after one more proposal: the round still waits for a member that it
        waited for, and nothing is to be sent."""
        x = self._witness
        if x is None or x.conn is None or now >= self._deadline.get(x.replica, math.inf):
            return False
        if now >= self._late_s and (not self._was_late or (self._half_s is None and 2 * len(proposed) >= self._count)):
            return False  # members at work are to be called in, or half of all are here
        counts_alike = self._quorate_s is not None or len(proposed) < self._enough
        return counts_alike and self._awaited(x, proposed)

    def _leave_together(self, now: float, proposed: Container[str]) -> bool:
        """Whether the last round, of leavers alone, waits for other leavers to propose their remaining steps."""
        self._last_s = now if self._last_s is None else self._last_s
        leaving = (x for x in self._roster.connected() if x.leaving and not (x.said_bye or x.dismissed))
        others = (x for x in leaving if x.at_end is None and x.replica not in proposed)
        return now < self._last_s + PATIENCE_S and any(map(self._versions.held_by, others))

    def missed(self, proposed: Container[str]) -> list[Member]:
        """Members that have missed their call-in."""
        missed = [x for x in self._roster.connected() if self._awaited(x, proposed) and self._versions.held_by(x)]
        return [
            x for x in missed if not self._is_slow(x) or self._rhythm is None or self._rhythm.is_worth_waiting_for(x)
        ]

    def _call_in(self, member: Member, version: int, *, early: bool = False) -> Effects:
        """Asks for a contribution at the next step boundary."""
        event = Emit("call_in", *member.incarnation_id, self._fragment, version, data={"early": True} if early else {})
        return [*send([member], m.CallIn(self._fragment, version)), event]

    def deadline_s(self, now: float, proposed: Container[str]) -> float:
        due = [t for replica, t in self._deadline.items() if replica not in proposed]
        if self._opened_s is not None:
            due += [self._late_s, self._arrival_s, self._still_s()]
        else:
            due.append(self.early_s(now, proposed))
            due += [self._rhythm.overdue_s] if self._rhythm is not None else []
            due += [self._last_s + PATIENCE_S] if self._last_s is not None else []
        return min((t for t in due if t > now), default=math.inf)

    # ------------------------------------------------------------ slow members

    def _is_slow(self, x: Member) -> bool:
        return self._rhythm is not None and x.speed.slow

    def _begins(self, now: float, proposers: Collection[Member], missing: Collection[Member]) -> bool:
        """Whether the round opens. Leavers and slow members wait for a member that opens it by itself: one that still
        fetches cannot, and is waited for within the grace; one without units does not, since it waits for others'."""
        if missing and not any(self._versions.held_by(x) and x.state != "out_of_units" for x in missing):
            return True
        return not all(x.leaving or self._early(now, x) for x in proposers)

    def _early(self, now: float, x: Member) -> bool:
        """Whether a proposal of ``x`` opens no round, since it was asked for before the others were ready."""
        return self._is_slow(x) and not self._hurried and self._rhythm is not None and now < self._rhythm.overdue_s

    def _open(self, now: float) -> None:
        self._opened_s = now
        if self._began_s is not None and (self._rhythm is None or now < self._rhythm.overdue_s):
            self.round_s = now - self._began_s

    def _watch(self, now: float, proposed: Collection[str], missing: Collection[Member]) -> None:
        """Notes whether the others have waited for a member since half of them were here."""
        self._count = len(proposed) + len(missing)
        if self._half_s is None and len(proposed) >= len(missing):
            self._half_s = now
        x = self._witness
        if self._half_s is not None and x is not None and x.replica in proposed and self.round_s:
            x.speed.kept_waiting |= now - self._half_s >= LONG * self.round_s

    def call_early(self, now: float, proposed: Container[str]) -> Effects:
        """Calls in slow members that are due."""
        if self._rhythm is None:
            return []
        due = [x for x in self._speeds.slow() if now >= self._rhythm.call_s(x) and self._can_be_called(x, proposed)]
        return [effect for x in due for effect in self._call_early(now, x)]

    def _call_early(self, now: float, x: Member) -> Effects:
        if x.replica in self._called_s:
            return []
        version = self._versions.at.version + 1
        self._called_s[x.replica], x.called_in[self._fragment] = now, version
        return self._call_in(x, version, early=True)

    def _can_be_called(self, x: Member, proposed: Container[str]) -> bool:
        awaited = self._awaited(x, proposed) and self._versions.held_by(x)
        return awaited and x.state == "training" and x.replica not in self._called_s

    def early_s(self, now: float, proposed: Container[str]) -> float:
        """When the next slow member is to be called in."""
        if self._rhythm is None:
            return math.inf
        due = [self._rhythm.call_s(x) for x in self._speeds.slow() if self._can_be_called(x, proposed)]
        return min((t for t in due if t > now), default=math.inf)

    def _slow_deadline_s(self, now: float, x: Member) -> float:
        """Until when a slow member is waited for: one of its steps, or two since its call-in. Not at all if that is
        long for a round: its steps go into a later one."""
        if self._rhythm is None or x.state != "training" or not self._rhythm.is_worth_waiting_for(x):
            return now
        return max(now + max(0.5, x.step_s), self._called_s[x.replica] + max(0.5, 2 * x.step_s))

    def _awaited(self, member: Member, proposed: Container[str]) -> bool:
        if member.replica in proposed or member.standby:
            return False
        if self._versions.held_by(member):
            return not (member.leaving or member.finished or member.stalled)
        return self._fragment in member.catching_up
