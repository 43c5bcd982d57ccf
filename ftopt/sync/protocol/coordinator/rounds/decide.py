"""Steps 3 to 5 of the protocol, coordinator side: the attempt under way, from its quorum to its commit or abort.

An attempt has a fixed quorum. It commits when every member has prepared with the same digest, even if some have died
since, and one of them is alive to hold the result. It aborts when a member fails, or is lost before it has prepared.
Members that keep the others waiting for too long are left out of the next attempt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import CoordinatorEffect, Effects, Emit
from ftopt.sync.protocol.coordinator.roster.roster import Member, send
from ftopt.sync.protocol.coordinator.rounds.alike import EqualContributions, results_differ
from ftopt.sync.protocol.coordinator.rounds.apart import apart, chosen
from ftopt.sync.protocol.coordinator.rounds.attempts import Attempt, AttemptNumbers, Failure, RoundOutcome
from ftopt.sync.protocol.coordinator.rounds.gather import Formed, Gather

_NEXT_S = 0.01
"""Until the next look, where one is due at once."""


class Decide:
    """The attempts of one fragment, one at a time.

    ``undropped``: gone incarnations that the next commit drops from COUNT. ``attempts``, ``aborted``, ``mismatches``:
    their numbers.
    """

    def __init__(self, gather: Gather, numbers: AttemptNumbers) -> None:
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.aborted = self.mismatches = 0
        self.undropped: dict[str, int] = {}
        self._fragment = gather.versions.fragment
        self._versions, self._roster, self._policy = gather.versions, gather.roster, gather.policy
        self._gather, self._assignment, self._numbers = gather, gather.assignment, numbers
        self._usual_s = 0.0
        self._apart: frozenset[str] = frozenset()
        self._equal = EqualContributions()
        self._group = 0
        self._group_key: object = None

    def restart(self) -> None:
        """Drops the attempt under way, after a start, a restart or a rollback."""
        self.attempt = self._group_key = None

    # ------------------------------------------------------------ step 3

    def begin(self, now: float, formed: Formed) -> Effects:
        members, chosen = formed.members, formed.contributions
        contributors = [c for c in chosen.values() if c.weight > 0]
        self.attempts += 1
        a = self.attempt = Attempt(
            attempt=self._numbers.next(),
            version=self._versions.at.version + 1,
            members=tuple(x.incarnation_id for x in members),
            contributions=chosen,
            drop=tuple(sorted(self.undropped.items())),
            advance=max(c.steps for c in contributors or chosen.values()),
            started_s=now,
            late={x.replica: x.late for x in members},
        )
        self._assignment.begin(a)
        key = tuple((x.incarnation_id, x.conn) for x in members)
        if key != self._group_key:
            self._group, self._group_key = a.attempt, key
        data = {"members": [list(x) for x in a.members], "retry": formed.retry}
        data |= {"older": sorted(formed.older)} if formed.older else {}
        data |= self._gather.waits(now, members)
        effects = [self._event("quorum", a, **data, steps=[c.steps for c in chosen.values()])]
        for x in members:
            if reason := formed.outliers.get(x.replica):
                effects.append(self._gather.excluded(x, reason, attempt=a.attempt))
        for rank, member in enumerate(members):
            effects += self._invite(member, rank, a, formed)
        return effects

    def _invite(self, member: Member, rank: int, a: Attempt, formed: Formed) -> Effects:
        f = self._fragment
        member.newcomer.discard(f)
        member.catching_up.discard(f)
        before, member.members_sent[f] = member.members_sent.get(f, ()), a.members
        last_step = self._gather.proposals[member.replica].last_step
        outlier, older = formed.outliers.get(member.replica, ""), member.replica in formed.older
        quorum = a.invitation(f, self._group, rank, before, last_step=last_step)
        return send([member], replace(quorum, outlier=outlier, older=older))

    # ------------------------------------------------------------ step 4

    def reduces_on(self, member: Member) -> bool:
        """Whether a member's report is neither the attempt's first, which sets its peers' time, nor decides it."""
        a = self.attempt
        return a is not None and member.replica in a.prepared and len(a.prepared) > 1 and a.verdict() is None

    def prepare(self, now: float, member: Member, message: m.Prepared) -> None:
        a = self.attempt
        member.busy_since_s = None
        if a is None or a.attempt != message.attempt:
            return
        if member.incarnation_id in a.incarnation_ids and member.replica not in a.lost:
            a.prepared[member.replica] = message
            a.reported_s = now

    def fail(self, now: float, member: Member, message: m.Failed) -> Effects:
        """Handles a member whose reduction failed, or whose reducer is free again after an ended attempt."""
        a = self.attempt
        member.busy_since_s = None
        if a is None or a.attempt != message.attempt or member.incarnation_id not in a.members:
            return []
        self._gather.failures += 1
        retry_s = now + min(2.0, 0.05 * 2**self._gather.failures)
        hung = any(x.busy_since_s is not None and x.busy_since_s < a.started_s for x in a.silent(self._roster))
        effects = self._abort(now, a, f"{member.replica}: {message.reason}", retry_s=retry_s)
        member.busy_since_s = None
        return effects + self._blame(now, a, member, message, hung=hung)

    def _blame(self, now: float, a: Attempt, member: Member, message: m.Failed, *, hung: bool) -> Effects:
        """Counts a failure against its pair, or its suspects; all hear which members sit out because of it. ``hung``: a
        member has not reported since an earlier attempt, which explains a failure that names nobody."""
        partitions, dead_after_s, who = self._gather.partitions, self._policy.dead_after_s, member.incarnation_id
        if message.cause == "state" or (message.cause == "values" and partitions.suspects.doubts(who)):
            return []
        named = message.peer in a.contributions and message.peer != member.replica
        out: dict[m.IncarnationId, float] = {}
        if named:
            peer = (message.peer, dict(a.members)[message.peer])
            pause_s = partitions.failed(now, who, peer, dead_after_s=dead_after_s)
            out, what = (
                {who: pause_s, peer: pause_s} if pause_s else {},
                "do not reach each other: one of the two takes",
            )
        if not out and not hung and (not named or self._gather.unexplained):
            # Also one that is named may merely have been the first to give up.
            again = self._gather.unexplained > 0
            self._gather.unexplained += 1
            out = partitions.suspects.failed(
                now, a.members, who, began_s=a.started_s, again=again, dead_after_s=dead_after_s
            )
            what = "may be why reductions fail, and take"
        if not out or len(a.members) == 1:
            return []
        names, pause_s = [replica for replica, _ in out], max(out.values())
        data = {"replicas": names, "peer": message.peer if named else "", "seconds": pause_s, "reason": message.reason}
        text = (
            f"{' and '.join(names)} {what} no part in the next outer steps, for {pause_s:.3g} s at least, and keep all "
            f"inner steps for later ones ({member.replica}: {message.reason})"
        )
        event = Emit("kept_out", *who, self._fragment, a.version, a.attempt, data=data)
        return [event, *send(self._roster.connected(), m.Hold(text))]

    def lose(self, replica: str) -> None:
        """Notes that a member is away, or takes no part for now; if it has prepared, it still counts."""
        if self.attempt is not None and replica in self.attempt.contributions:
            self.attempt.lost.add(replica)

    def unprepare(self, replica: str) -> None:
        """Withdraws the report of a member that cannot apply the result: its fetch frees its contribution, which must
        not be counted."""
        if self.attempt is not None:
            self.attempt.prepared.pop(replica, None)

    def find(self, replica: str, prepared: m.PreparedAttempt) -> bool:
        """Finds the prepared attempt of a member that is back; returns whether that made the current version."""
        a, last = self.attempt, self._versions.last
        known = a.prepared.get(replica) if a else None
        if a and known and (known.attempt, known.digest) == (prepared.attempt, prepared.digest):
            a.lost.discard(replica)
        return (prepared.attempt, prepared.digest) == (last.attempt, last.digest) and replica not in self._apart

    # ------------------------------------------------------------ step 5

    def step(self, now: float) -> Effects:
        """Decides the attempt under way if it can be decided, or has taken too long."""
        a = self.attempt
        if a is None:
            return []
        verdict = a.verdict()
        if verdict is None:
            return self._give_up(now, a) or self._release(now, a)
        if isinstance(verdict, Failure):
            return self._abort(now, a, verdict.reason)
        if isinstance(verdict, RoundOutcome):
            return self._commit(now, a, verdict.digest)
        digests = {replica: a.prepared[replica].digest for replica, _ in a.members}
        effects = [self._event("mismatch", a, digests=digests, votes=dict(Counter(digests.values())))]
        self.mismatches += 1
        if not self.mismatches & (self.mismatches - 1):  # the first, the second, the fourth
            effects += send(self._roster.present(a.members), m.Hold(results_differ(a.version, digests)))
        if verdict.majority:
            effects += self._abort(now, a, "the digests differ")
            return effects + self._evict(a, verdict.majority)
        self._gather.ties += 1
        if self._gather.ties < 2:
            return effects + self._abort(now, a, "the digests differ")
        return effects + self._commit(now, a, chosen(digests, a.prepared, a.alive()))

    def deadline_s(self, stepped_s: float) -> float:
        """When `step` is to be called at the latest, if nothing happens before; ``stepped_s``: when it last was."""
        a = self.attempt
        if a is None:
            return math.inf
        # The next member to count as quiet. Times in the past were looked at, and change nothing by themselves; but for
        # members that were quiet already when the attempt began, with that step.
        quiet = [x.quiet_from_s(self._policy) for x in a.silent(self._roster)]
        due = [self._overdue_s(stepped_s, a), *(x for x in (*quiet, self._release_s(a)) if x > stepped_s)]
        if stepped_s <= a.started_s and min(quiet, default=math.inf) <= stepped_s:
            due.append(stepped_s + _NEXT_S)
        return min(due)

    def _release_s(self, a: Attempt) -> float:
        return a.started_s + self._usual_s + self._policy.grace_s + self._policy.dead_after_s

    def _release(self, now: float, a: Attempt) -> Effects:
        """Lets members that have proposed since the attempt began train on, if it takes long."""
        if now < self._release_s(a):
            return []
        proposals = self._gather.proposals.keys() - a.contributions.keys()
        return self._gather.release([x for x in self._roster.connected() if x.replica in proposals])

    def _overdue_s(self, now: float, a: Attempt) -> float:
        """When the attempt is given up, if there is another member to go on with."""
        others = a.prepared or self._gather.proposals.keys() - a.contributions.keys()
        if not others and self._assignment.whole_batch:  # a member without a share would be given one
            others = {x.replica for x in self._gather.able(now, but=a.contributions) if not x.leaving}
        policy, alone = self._policy, len(a.members) == 1
        patience_s = policy.grace_s + policy.dead_after_s if a.prepared or alone else policy.evict_after_s
        return a.overdue_s(self._roster, patience_s, self._usual_s) if others else math.inf

    def _quiet(self, now: float, a: Attempt) -> list[Member]:
        """Members without a result or a heartbeat, if the others are enough for a quorum."""
        quiet = [x for x in a.silent(self._roster) if now >= x.quiet_from_s(self._policy)]
        if not quiet:
            return []
        able = [x for x in self._roster.connected() if x.replica in self._gather.proposals and x not in quiet]
        enough = sum(not x.busy(now, self._policy.dead_after_s) for x in able) >= self._policy.min_replicas
        return quiet if enough else []

    def _give_up(self, now: float, a: Attempt) -> Effects:
        """Makes members that have not prepared for long, or are not heard, sit out until their reducers are free."""
        if now >= self._overdue_s(now, a):
            out = a.silent(self._roster)
            for x in out:
                x.late = max(x.late, a.late[x.replica] + 1)
            reason = f"no result after {now - a.started_s:.1f} s"
        elif out := self._quiet(now, a):
            for x in out:
                x.quiet += 1
            reason = f"no heartbeat for {now - min(x.heard_s for x in out):.2f} s, and no result"
        else:
            return []
        effects = self._abort(now, a, f"{', '.join(x.replica for x in out)}: {reason}")
        for x in out:
            x.busy_since_s = -math.inf
        return effects

    def _evict(self, a: Attempt, majority: str) -> Effects:
        """Makes members that have disagreed twice with the majority fetch before they take part again."""
        effects: Effects = []
        for replica in (replica for replica, report in a.prepared.items() if report.digest != majority):
            self._gather.disagreed[replica] += 1
            member = self._roster.members.get(replica)
            if self._gather.disagreed[replica] >= 2 and member is not None:
                member.held.pop(self._fragment, None)
                self._gather.withdraw(replica)
                self._gather.catch_up.add(replica, heal=True)
                effects.append(Emit("evicted", *member.incarnation_id, self._fragment, a.version, a.attempt))
        return effects

    def _abort(self, now: float, a: Attempt, reason: str, *, retry_s: float | None = None) -> Effects:
        self._gather.abort(now, a.contributions, retry_s=retry_s)
        for x in a.silent(self._roster):
            x.busy_since_s = now if x.busy_since_s is None else x.busy_since_s
        self.attempt = self._group_key = None
        self.aborted += 1
        self._assignment.abort()
        abort = send(self._roster.present(a.members), m.Abort(self._fragment, a.attempt, reason))
        return [self._event("abort", a, reason=reason), *abort]

    def _commit(self, now: float, a: Attempt, digest: str) -> Effects:
        counted = self._assignment.commit(a)
        versions = self._versions
        d = a.decided(versions.at, digest, versions.last.inner_step, counted.done)
        versions.advance(d)
        self.attempt, self._usual_s = None, a.reported_s - a.started_s
        self.undropped = {r: i for r, i in self.undropped.items() if (r, i) not in a.drop}
        self._overtake(a)
        members = self._roster.present(a.members)
        agreed = {replica: a.prepared[replica] for replica, _ in a.members if a.prepared[replica].digest == digest}
        effects, self._apart = self._compare(a, agreed)
        holders = [x for x in members if x.replica in agreed and x.replica not in self._apart]
        for member in members:
            member.counted = (member.counted or {}) | {self._fragment: a.version}
        for member in holders:
            member.held[self._fragment] = versions.at
        for member in self._roster.connected():
            if not versions.held_by(member):
                self._gather.catch_up.add(member.replica)
        told, text = ((), "") if self._fragment else self._equal.look(a.version, a.contributions)
        if told:
            effects += send([x for x in members if x.replica in told], m.Hold(text))
        if a.lost:
            self._group_key = None
        self._gather.partitions.met(now, a.members)
        self._gather.commit(now, a.incarnation_ids, took_s=self._usual_s)
        data: dict[str, Any] = {"inner_step": d.inner_step, "members": [list(x) for x in d.members], "digest": digest}
        data |= {"chain": d.chain, "away": sorted(a.lost), **counted.data}
        commit = send(holders, m.Commit(self._fragment, a.version, a.attempt, digest, d.chain))
        return [d, *effects, self._event("decide", a, **data), *commit, *counted.effects]

    def _compare(self, a: Attempt, reports: Mapping[str, m.Prepared]) -> tuple[Effects, frozenset[str]]:
        """Compares live states that should be equal; returns the members that get no commit, but fetch the others'
        state. They have agreed on the result, so the attempt commits."""
        known = {x.replica: x.arithmetic for x in self._roster.present(a.members)}
        found = apart(reports, known, a.alive())
        if found is None:
            return [], frozenset()
        effects: Effects = []
        for replica, reason in found.faulty.items():
            data = {"reason": reason, "peak": reports[replica].peak, "fetches": replica in found.others}
            incarnation = dict(a.members)[replica]
            effects.append(Emit("diverged", replica, incarnation, self._fragment, a.version, a.attempt, data=data))
            effects += send(self._roster.present([(replica, incarnation)]), m.Hold(reason))
        if unlike := [x for x in found.others if x not in found.faulty]:
            effects.append(self._event("equalized", a, of=unlike, to=list(found.like)))
        return effects, frozenset(found.others)

    def _overtake(self, a: Attempt) -> None:
        """Makes the next quorum wait for members that came to hold the version after the attempt had begun."""
        f, before = self._fragment, a.version - 1
        for x in self._roster.connected():
            held = x.held.get(f)
            came_late = f in x.newcomer and x.called_in.get(f) != a.version
            if came_late and x.incarnation_id not in a.incarnation_ids and held is not None and held.version == before:
                x.catching_up.add(f)

    def _event(self, event: str, a: Attempt, **data: Any) -> CoordinatorEffect:
        inner_step = self._versions.last.inner_step
        return Emit(event, "coordinator", 0, self._fragment, a.version, a.attempt, inner_step, data)
