"""Steps 1 and 2 of the protocol, coordinator side: proposals towards one version, until an attempt forms.

`Gather.step` waits for members that are worth waiting for (`Waiting`), and `Gather._form` chooses the members of the
attempt among the proposers. After an abort the survivors, and all that have proposed since, go straight to the next
attempt with the same contributions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, send
from ftopt.sync.protocol.coordinator.rounds.assignment import Assignment
from ftopt.sync.protocol.coordinator.rounds.catch_up import Arrival, CatchUp
from ftopt.sync.protocol.coordinator.rounds.outliers import outliers
from ftopt.sync.protocol.coordinator.rounds.pace import Pace
from ftopt.sync.protocol.coordinator.rounds.partitions import Membership, Partitions
from ftopt.sync.protocol.coordinator.rounds.readings import Readings
from ftopt.sync.protocol.coordinator.rounds.speeds import Rhythm, Speeds
from ftopt.sync.protocol.coordinator.rounds.versions import Versions
from ftopt.sync.protocol.coordinator.rounds.waiting import Waiting
from ftopt.sync.protocol.messages import excluded
from ftopt.sync.protocol.policy import FaultPolicy


@dataclass(frozen=True, slots=True)
class Formed:
    """The members and contributions of an attempt to begin. ``outliers``: replica -> why its contribution weighs
    nothing. ``older``: replicas whose contributions weigh nothing, because others are of a later step."""

    members: list[Member]
    contributions: dict[str, m.Contribution]
    outliers: Mapping[str, str]
    older: frozenset[str]
    retry: bool


class Gather:
    """The round that gathers towards the version after the current one.

    ``proposals``: contributions by replica. ``retry``: an attempt has failed, and the next one waits for nobody else.
    ``failures``: number of failed attempts, ``unexplained`` of them for reasons that name no peer; ``ties``: number of
    results without a majority; ``disagreed``: replica -> how often it disagreed with a majority.
    """

    def __init__(
        self,
        fragment: int,
        roster: Roster,
        policy: FaultPolicy,
        *,
        partitions: Partitions,
        assignment: Assignment,
        speeds: Speeds,
    ) -> None:
        self.versions, self.roster, self.policy = Versions(fragment), roster, policy
        self.partitions, self.assignment = partitions, assignment
        self.catch_up = CatchUp(fragment, roster, patience_s=policy.dead_after_s)
        self._fragment = fragment
        self._membership = Membership(partitions, roster)
        self._readings = Readings(fragment)
        self._speeds = speeds
        self._calls_early = False
        self._pace = Pace()
        self._held_open = -1
        self._struck: set[str] = set()
        """Replicas whose contributions were out of line in their last round with others."""
        self.restart()

    def restart(self, now: float | None = None) -> None:
        """Begins the next round, after a new version. ``now``: when; None: not directly after the round before."""
        self.proposals: dict[str, m.Contribution] = {}
        self._since_s: dict[str, float] = {}
        """Replica -> when it proposed, unless it was called in or told to train on, and so does not wait."""
        self.failures = self.unexplained = self.ties = 0
        self.disagreed = Counter[str]()
        self.retry = False
        self._retry_s = 0.0
        self._grace_s = math.inf
        """The adaptive grace at the last look."""
        early = self._calls_early and now is not None and self._pace.round_s > 0
        rhythm = Rhythm(now, self._pace.round_s) if early and now is not None else None
        self._waiting = Waiting(
            self.versions, self.roster, self.policy, speeds=self._speeds, rhythm=rhythm, began_s=now
        )
        self._late: set[str] = set()
        self._missed = set[str]()
        """Replicas that have missed a call-in of this round."""
        self._notified_train_on: set[str] = set()

    def commit(self, now: float, members: frozenset[m.IncarnationId], *, took_s: float) -> None:
        self._end_waits(now, self.proposals)
        if not self.retry:
            self._pace.learn(self._waiting.quorum_s, took_s)
        self._pace.round_s = self._waiting.round_s or self._pace.round_s
        self._calls_early = self._speeds.finished(self._fragment, self.proposals)
        self._membership.taken(members, self.proposals)
        self.restart(now)

    def abort(self, now: float, members: Container[str], *, retry_s: float | None = None) -> None:
        """Goes on after a failed attempt; the next one forms at ``retry_s`` at the earliest."""
        self._end_waits(now, members)
        self.retry = True
        self._retry_s = self._retry_s if retry_s is None else retry_s

    def _end_waits(self, now: float, replicas: Container[str]) -> None:
        """Notes that these have waited for their peers, so that no inner steps were expected of them (TAIL)."""
        for x in self.roster.connected():
            if x.replica in replicas and x.busy_since_s is None:
                x.moved_s = now

    @property
    def round_s(self) -> float:
        """Seconds from the beginning of the last round that was on time until it was opened; 0: there was none."""
        return self._pace.round_s

    @property
    def _next(self) -> int:
        return self.versions.at.version + 1

    # ------------------------------------------------------------ what comes in

    def propose(self, member: Member, contribution: m.Contribution, *, now: bool = False) -> Effects:
        """Step 1: a proposal counts only from a holder of the version that it builds on (I5).

        ``now``: the others are called in at once, unless the proposal opens no round.
        """
        if not self.versions.held_by(member):
            self.catch_up.proposed(member.replica)
            return []
        fits = self.assignment.fits(member.incarnation_id, contribution)
        if contribution.version != self.versions.at.version or not fits:
            return []
        self._late.discard(member.replica)
        known = self.proposals.setdefault(member.replica, contribution)
        if known != contribution:
            return [Emit("frozen", *member.incarnation_id, self._fragment, self._next)]
        if member.called_in.get(self._fragment) != self._next:
            self._since_s.setdefault(member.replica, member.heard_s)
        member.proposed()
        if not now or member.leaving:
            return []
        self._waiting.hurry()
        return [Emit("hurry", *member.incarnation_id, self._fragment, self._next)]

    def waits_on(self, now: float, member: Member, contribution: m.Contribution) -> bool:
        """Whether the round, after this proposal, still waits for the same members as at the last look."""
        shorter = self._pace.grace_s([contribution], self.policy.grace_s) < self._grace_s
        if shorter or self.proposals.get(member.replica) != contribution or self.retry:
            return False
        return math.isinf(self.assignment.recheck_s) and self._waiting.goes_on(now, self.proposals)

    def read(self, now: float, member: Member, reading: m.Reading) -> Effects:
        """Takes a reading of a holder of the current version, and answers with the means over all."""
        at = self.versions.at
        if not self.versions.held_by(member) or reading.version != at.version:
            return []
        return send([member], self._readings.take(now, at, member.replica, reading.values))

    def withdraw(self, replica: str) -> None:
        self.proposals.pop(replica, None)
        self._since_s.pop(replica, None)
        self._waiting.forget(replica)
        self._readings.drop(replica)
        self._notified_train_on.discard(replica)
        self.assignment.forget(replica)

    # ------------------------------------------------------------ what follows

    def able(self, now: float, *, but: Container[str] = ()) -> list[Member]:
        """Members that can compute a contribution and hand it in. Those that were late with a share before come in only
        if there is nobody else."""
        others = (x for x in self.roster.training() if x.replica not in but)
        holders = [x for x in others if self.versions.held_by(x) or self.assignment.expects(x)]
        holders = [x for x in holders if not x.stalled] or holders
        able = [x for x in holders if not x.busy(now, self.policy.dead_after_s)]
        return [x for x in able if x.replica not in self._late] or able

    def assign(self, now: float) -> Effects:
        """PLAN: gives the shares of members that cannot hand them in to members that can."""
        renewed, effects = self.assignment.assign(
            self.versions.at, self.proposals, lambda: self._membership.choose(now, self.able(now))
        )
        if renewed:
            self._waiting = Waiting(self.versions, self.roster, self.policy, speeds=self._speeds)
            self.retry = False
        return effects

    def step(self, now: float) -> tuple[Effects, Formed | None]:
        """Does everything due while no attempt is under way; returns the next attempt if one forms."""
        effects = self.assign(now)
        effects += self._waiting.call_early(now, self.proposals)
        proposers = self._proposers()
        if not proposers:
            self._waiting.close()
            self.retry = False
            return effects, None
        if self.retry:
            return self._form(now, proposers, effects) if now >= self._retry_s else (effects, None)
        if (waits := self._wait(now, proposers)) is not None:
            return effects + waits + self._release_for(proposers, self._waiting.awaited), None
        owing = self.assignment.missing(self.proposals) if self.assignment.whole_batch else None
        for x in self._waiting.missed(self.proposals):
            if owing is not None and x.replica not in owing:
                continue  # it has no share, and so nothing to propose
            again, at_work = x.replica in self._missed, x.state == "training" and self._fragment not in x.newcomer
            self._missed.add(x.replica)
            if (at_work or not again) and x.miss(now, self.policy.dead_after_s, at_work=at_work, again=again):
                effects.append(Emit("stalled", *x.incarnation_id, self._fragment, self._next))
        if late := self.assignment.missing(self.proposals):
            self._late.update(late)
            effects += self.assign(now)
            return effects + (self._wait(now, proposers) or []), None  # the round of the new shares begins now
        return self._form(now, proposers, effects)

    def _proposers(self) -> list[Member]:
        """Connected members that have proposed, by id."""
        if 2 * len(self.proposals) > len(self.roster.connected()):
            return [x for x in self.roster.connected() if x.replica in self.proposals]
        found = (self.roster.members[replica] for replica in sorted(self.proposals))
        return [x for x in found if x.conn is not None]

    def _wait(self, now: float, proposers: list[Member]) -> Effects | None:
        """Waits for members that have not proposed; None once the quorum need not wait any more."""
        self._grace_s = self._pace.grace_s(self.proposals.values(), self.policy.grace_s)
        return self._waiting.step(now, proposers, grace_s=self._grace_s, arrival=self._arrival)

    def deadline_s(self, stepped_s: float) -> float:
        """When `step` is to be called at the latest, if nothing happens before; ``stepped_s``: when it last was."""
        if not self.proposals:
            return self._waiting.early_s(stepped_s, self.proposals)
        due_s = stepped_s + self.assignment.recheck_s
        if self.retry and self._retry_s > stepped_s:
            return min(due_s, self._retry_s)
        return min(due_s, self._waiting.deadline_s(stepped_s, self.proposals))

    def _arrival(self, replica: str) -> Arrival | None:
        """When a member that fetches will hold the version, if the others can train on until then."""
        others = (self.roster.members.get(x) for x in self.proposals)
        if self.assignment.whole_batch or any(x is not None and x.leaving for x in others):
            return None
        return self.catch_up.arrival(replica)

    def _release_for(self, proposers: list[Member], awaited: tuple[str, ...]) -> Effects:
        """Lets proposers train on while the round is held open for members that still fetch."""
        found = self.release(proposers) if awaited else []
        if found and self._held_open != self.versions.at.version:
            self._held_open = self.versions.at.version
            found.append(Emit("held_open", fragment=self._fragment, version=self._next, data={"for": list(awaited)}))
        return found

    def release(self, proposers: list[Member]) -> Effects:
        """Tells proposers that their training threads need not wait for the result, once per round."""
        new = [x for x in proposers if x.replica not in self._notified_train_on]
        for x in new:
            self._notified_train_on.add(x.replica)
            self._since_s.pop(x.replica, None)
        return send(new, m.TrainOn(self._fragment))

    def _form(self, now: float, proposers: list[Member], effects: Effects) -> tuple[Effects, Formed | None]:
        """Step 2's end: forms the attempt of all proposers that reach each other, if they are enough."""
        least = self.policy.min_replicas
        free = [x for x in proposers if not x.busy(now, self.policy.dead_after_s)]
        members = self._membership.choose(now, free)
        if len(members) < least:  # better a quorum that may fail than none
            members = free
        if not members or (len(members) < least and not self.retry):
            return effects + self.release(proposers), None
        if not self.assignment.covers({x.incarnation_id: self.proposals[x.replica] for x in members}):
            return effects, None
        chosen = {x.replica: self.proposals[x.replica] for x in members}
        newest = max((c.at_step for c in chosen.values() if c.weight > 0), default=0)
        older = frozenset(replica for replica, c in chosen.items() if 0 < c.at_step < newest)
        chosen |= {replica: excluded(chosen[replica]) for replica in older}
        odd = {} if self.assignment.whole_batch else self._outliers(chosen)
        chosen |= {replica: excluded(chosen[replica]) for replica in odd}
        if not any(c.weight > 0 for c in chosen.values()) and not self.assignment.counts_without_weight(chosen):
            effects += self._void(now, members, odd)
            rest = [x for x in proposers if x.replica in self.proposals]  # the rest sits out, for up to a minute
            effects += self.release(rest)
            return effects + (self._wait(now, rest) or [] if rest else []), None
        return effects, Formed(members, chosen, odd, older, self.retry)

    def waits(self, now: float, members: Sequence[Member]) -> dict[str, Any]:
        """What the event of a quorum says of waiting: for how many seconds each member has waited since its proposal
        (None: it does not wait), and for which replica the round has waited last."""
        since = [self._since_s.get(x.replica) for x in members]
        last = {"for": self._waiting.last} if self._waiting.last else {}
        return {"waited": [None if since_s is None else round(now - since_s, 3) for since_s in since], **last}

    def _outliers(self, chosen: Mapping[str, m.Contribution]) -> dict[str, str]:
        """Contributions that are out of line, and why. Without peers' contributions, the last round with others
        counts: the others may be at their end, and leave with this contribution's result."""
        others = any(x.replica not in chosen for x in self.roster.connected())
        odd = outliers(chosen, self.policy.outlier_ratio, struck=self._struck if others else ())
        if len(chosen) > 1:
            self._struck = (self._struck - chosen.keys()) | odd.keys()
        return odd

    def excluded(self, member: Member, reason: str, *, attempt: int | None = None) -> Emit:
        """The event of an outlier."""
        c = self.proposals[member.replica]
        data = {"reason": reason, "norm": c.norm, "peak": c.peak}
        return Emit("outlier", *member.incarnation_id, self._fragment, self._next, attempt, data=data)

    def _void(self, now: float, members: list[Member], odd: Mapping[str, str]) -> Effects:
        """Frees contributions that have no weight together, and will be in no attempt."""
        effects: Effects = []
        self.partitions.released(now)  # members that sit out may have all the weight
        for x in members:
            if reason := odd.get(x.replica):
                effects.append(self.excluded(x, reason))
            effects += send([x], m.Void(self._fragment, odd.get(x.replica, "")))
        self._membership.taken({x.incarnation_id for x in members}, self.proposals)
        self._end_waits(now, {x.replica for x in members})
        for x in members:
            x.newcomer.discard(self._fragment)  # else it would be called in again at once
            del self.proposals[x.replica]
        rest = self.proposals
        self.restart(now)
        self.proposals = rest
        return [*effects, Emit("void", fragment=self._fragment, version=self._next)]
