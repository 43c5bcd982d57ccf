"""The rounds of one fragment, coordinator side: proposals, attempts, decisions.

A round gathers proposals towards ``version + 1``. When nobody needs to be waited for any more (`Waiting`), an *attempt*
with a fixed quorum starts. It commits when every member has prepared with the same digest, or has died after preparing
with it, and one of them is alive to hold the result; it aborts when a member fails or is lost before it prepared. After
an abort the survivors, and whoever has proposed since, go straight to the next attempt with the same contributions.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.attempts import Attempt, AttemptNumbers, Failure, RoundOutcome
from ftopt.sync.protocol.coordinator.batch_shares import BatchShares
from ftopt.sync.protocol.coordinator.catch_up import Arrival, CatchUp
from ftopt.sync.protocol.coordinator.effects import CoordinatorEffect, Decided, Emit, SendTo
from ftopt.sync.protocol.coordinator.grants import Grants
from ftopt.sync.protocol.coordinator.outliers import outliers
from ftopt.sync.protocol.coordinator.pace import Pace
from ftopt.sync.protocol.coordinator.partitions import Membership, Partitions
from ftopt.sync.protocol.coordinator.readings import Readings
from ftopt.sync.protocol.coordinator.roster import Member, Roster
from ftopt.sync.protocol.coordinator.waiting import Waiting
from ftopt.sync.protocol.intervals import Ranges, low_water
from ftopt.sync.protocol.limits import HISTORY
from ftopt.sync.protocol.messages import excluded
from ftopt.sync.protocol.settings import Sync


class Rounds:
    """Everything the coordinator knows of one fragment.

    ``at``: the current version. ``history``: chains of past versions, to tell a fork from lateness. ``last``: the
    decision that made ``at``, if known. ``undropped``: gone incarnations that the next commit drops from COUNT.
    """

    def __init__(self, fragment: int, roster: Roster, sync: Sync, numbers: AttemptNumbers, cuts: Partitions) -> None:
        self.fragment = fragment
        self.roster = roster
        self.sync = sync
        self.numbers = numbers
        self.at = m.Position(fragment, -1, "")
        self.inner_step = 0
        self.history: dict[int, str] = {}
        self.last: Decided | None = None
        self.undropped: dict[str, int] = {}
        self.proposals: dict[str, m.Contribution] = {}
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.aborted = 0
        self.catch_up = CatchUp(fragment, roster)
        self.grants: Grants | None = None  # the sample ledger, of fragment 0
        self.batch_shares: BatchShares | None = None  # in its place: a global batch that is shared out
        self._partitions = cuts
        self._membership = Membership(cuts, roster)
        self._readings = Readings(fragment)
        self._stepped_s = -math.inf
        self._usual_s = 0.0
        self._pace = Pace()
        self._group = 0
        self._group_key: object = None
        self._held_open = -1
        self._new_round()

    def _new_round(self) -> None:
        self.proposals.clear()
        self._late: set[str] = set()
        self._waiting = Waiting(self.fragment, self.roster, self.sync)
        self._retry = False
        self._retry_s = 0.0
        self._failures = 0
        self._ties = 0
        self._notified_train_on: set[str] = set()
        self._strikes: Counter[str] = Counter()

    # ------------------------------------------------------------ state

    def restore(self, at: m.Position, inner_step: int, *, last: Decided | None = None) -> None:
        """Takes ``at`` as the truth: after a start, a restart or a rollback."""
        self.at, self.inner_step, self.last = at, inner_step, last
        self.history = {v: chain for v, chain in self.history.items() if v < at.version}
        self.history[at.version] = at.chain
        self.attempt = None
        self._group_key = None
        self._new_round()

    def holds(self, member: Member) -> bool:
        return member.held.get(self.fragment) == self.at

    def off_branch(self, position: m.Position) -> bool:
        """CHAIN: whether a position is not on this history."""
        known = self.history.get(position.version, position.chain)
        later = position.version > self.at.version
        return later or known != position.chain or not m.same_start(position.chain, self.at.chain)

    # ------------------------------------------------------------ inputs

    def propose(self, member: Member, contribution: m.Contribution, *, now: bool = False) -> list[CoordinatorEffect]:
        """Step 1: a proposal counts only from a holder of the version that it builds on (I5).

        ``now``: the others are called in at once, unless the proposal opens no round.
        """
        if not self.holds(member):
            self.catch_up.add(member.replica)
            return []
        if contribution.version != self.at.version:
            return []
        if self.batch_shares is not None and not self.batch_shares.fits(member.incarnation_id, contribution):
            return []
        self._late.discard(member.replica)
        known = self.proposals.setdefault(member.replica, contribution)
        if known != contribution:
            return [Emit("frozen", member.replica, member.incarnation, self.fragment, self.at.version + 1)]
        member.stalled_at = None
        if not now or member.leaving:
            return []
        self._waiting.hurry()
        return [Emit("hurry", member.replica, member.incarnation, self.fragment, self.at.version + 1)]

    def waits_on(self, now: float, member: Member, contribution: m.Contribution) -> bool:
        """Whether a proposal that has come in leaves the round as it was last seen, waiting for the same others."""
        taken = self.proposals.get(member.replica) == contribution and not (
            contribution.grace and contribution.overlap_s
        )
        if not taken or self.attempt is not None or self._retry or self.batch_shares is not None:
            return False
        return self._waiting.goes_on(now, self.proposals, self.holds)

    def reduces_on(self, member: Member) -> bool:
        """Whether a report that has come in is neither the first of the attempt, which sets its peers' time, nor the
        one that decides it."""
        a = self.attempt
        return a is not None and member.replica in a.prepared and len(a.prepared) > 1 and a.verdict() is None

    def read(self, now: float, member: Member, reading: m.Reading) -> list[CoordinatorEffect]:
        """Numbers of a holder of the current version, answered with everybody's means."""
        if not self.holds(member) or reading.version != self.at.version or member.conn is None:
            return []
        return [SendTo(member.conn, self._readings.take(now, self.at, member.replica, reading.values))]

    def lose(self, replica: str) -> None:
        """It is away, or gone: it offers its contribution again when it is back."""
        self.withdraw(replica)
        self.catch_up.drop(replica)

    def withdraw(self, replica: str) -> None:
        """It takes no part for now."""
        self.proposals.pop(replica, None)
        self._waiting.forget(replica)
        self._readings.drop(replica)
        self._notified_train_on.discard(replica)
        if self.batch_shares is not None:
            self.batch_shares.forget(replica)
        if self.attempt and replica in self.attempt.contributions:
            self.attempt.lost.add(replica)

    def find(self, replica: str, incarnation_id: m.PreparedAttempt) -> bool:
        """A member is back with what it had prepared; returns whether that is the current version by now."""
        a, d = self.attempt, self.last
        if a and incarnation_id.attempt == a.attempt and a.prepared.get(replica) == incarnation_id.digest:
            a.lost.discard(replica)
        return (
            d is not None
            and d.chain == self.at.chain
            and (incarnation_id.attempt, incarnation_id.digest) == (d.attempt, d.digest)
        )

    def prepare(self, now: float, member: Member, message: m.Prepared) -> None:
        """Step 4."""
        a = self.attempt
        member.busy_since_s = None
        if (
            a
            and a.attempt == message.attempt
            and member.incarnation_id in a.incarnation_ids
            and member.replica not in a.lost
        ):
            a.prepared[member.replica] = message.digest
            a.reported_s = now

    def fail(self, now: float, member: Member, message: m.Failed) -> list[CoordinatorEffect]:
        """A member could not reduce, or has ended what is over. Of a pair that fails twice one sits out
        (`Partitions`)."""
        a = self.attempt
        member.busy_since_s = None
        if a is None or a.attempt != message.attempt or member.incarnation_id not in a.members:
            return []
        if message.peer in a.contributions and message.peer != member.replica:
            peer = (message.peer, dict(a.members)[message.peer])
            self._partitions.failed(now, member.incarnation_id, peer, dead_after_s=self.sync.dead_after_s)
        self._failures += 1
        self._retry_s = now + min(2.0, 0.05 * 2**self._failures)
        effects = self._abort(now, f"{member.replica}: {message.reason}")
        member.busy_since_s = None
        return effects

    def lacks(self, now: float, member: Member) -> None:
        """It could not fetch, or what it holds does not fit."""
        member.in_doubt |= member.held.pop(self.fragment, None) is not None
        member.maybe_fetched.pop(self.fragment, None)
        member.told.pop(self.fragment, None)
        self.withdraw(member.replica)
        if self.attempt is not None:  # its contribution is free as soon as it has fetched: it must not be counted
            self.attempt.prepared.pop(member.replica, None)
        self.catch_up.failed(now, member.replica)

    def fetched(self, now: float, member: Member, position: m.Position) -> None:
        """A fetch is complete; the version may have moved on since, and the member fetches on."""
        f = self.fragment
        self.catch_up.fetched(now, member.replica)
        known, hope = member.held.get(f), member.maybe_fetched.get(f)
        if known is not None and known.version > position.version:
            return  # it was said before the commit of what it holds by now
        member.held[f] = position
        if hope is not None and hope.version <= position.version:
            del member.maybe_fetched[f]
        if self.holds(member):
            member.catching_up.discard(f)
        else:
            member.catching_up.add(f)
            self.catch_up.add(member.replica)

    # ------------------------------------------------------------ what follows

    def step(self, now: float) -> list[CoordinatorEffect]:
        """Everything that has become due or decidable."""
        self._stepped_s = now
        effects = self._decide(now)
        if self.attempt is None:
            if self.batch_shares is not None:
                effects += self._share_out(now, self.batch_shares)
            effects += self._gather(now)
        return effects + self.catch_up.step(now, self.at)

    def deadline_s(self) -> float:
        """When `step` is to be called at the latest, if nothing happens before."""
        due_s = self.catch_up.deadline_s(self._stepped_s)
        if self.attempt is not None:
            return min(due_s, self._overdue_s(self.attempt), self._quiet_s(self.attempt))
        if not self.proposals:
            return due_s
        if self.batch_shares is not None:  # who is parted, or busy, takes part again when time has passed
            due_s = min(due_s, self._stepped_s + self.sync.dead_after_s)
        if self._retry and self._retry_s > self._stepped_s:
            return min(due_s, self._retry_s)
        return min(due_s, self._waiting.deadline_s(self._stepped_s, self.proposals))

    def _share_out(self, now: float, batch_shares: BatchShares) -> list[CoordinatorEffect]:
        """PLAN: whoever cannot hand in its share loses it to those who can. No attempt is under way."""
        holders = [x for x in self.roster.connected() if self.holds(x)]
        able = self._membership.choose(now, self._able(now))
        present = [x for x in able if not x.leaving or x.replica in self.proposals]
        effects = batch_shares.renew(self.at.version + 1, present, [x for x in able if not x.leaving])
        if effects and batch_shares.plan is not None:
            plan, incarnation_ids = batch_shares.plan, {x.replica: x.incarnation_id for x in holders}
            same = {
                r: c
                for r, c in self.proposals.items()
                if r in incarnation_ids and c.ranges == plan.share(incarnation_ids[r])
            }
            self.proposals = {r: replace(c, plan=plan.number) for r, c in same.items()}
            self._waiting, self._retry = Waiting(self.fragment, self.roster, self.sync), False
        return effects + batch_shares.tell(self.at.version + 1, holders)

    def _able(self, now: float) -> list[Member]:
        """Who can compute a share of a global batch, and hand it in."""
        holders = (x for x in self.roster.connected() if self.holds(x) and not x.stalled)
        return [x for x in holders if x.replica not in self._late and not x.busy(now, self.sync.dead_after_s)]

    def _gather(self, now: float) -> list[CoordinatorEffect]:
        proposers = [x for x in self.roster.connected() if x.replica in self.proposals]
        if not proposers:
            self._waiting.close()
            self._retry = False
            return []
        if self._retry:
            return self._form(now, proposers) if now >= self._retry_s else []
        grace_s = self._pace.grace_s(self.proposals.values(), self.sync.grace_s)
        waits = self._waiting.step(
            now, self.at.version + 1, proposers, self.holds, grace_s=grace_s, arrival=self._arrival
        )
        if waits is not None:
            return [*waits, *self._release_for(proposers, self._waiting.awaited)]
        effects: list[CoordinatorEffect] = []
        for x in self._waiting.hung(self.proposals, self.holds):
            x.stalled_at = x.inner_step
            effects.append(Emit("stalled", x.replica, x.incarnation, self.fragment, self.at.version + 1))
        if self.batch_shares is not None and (late := self.batch_shares.missing(self.proposals)):
            self._late.update(late)
            return effects + self._share_out(now, self.batch_shares)
        return effects + self._form(now, proposers)

    def _arrival(self, replica: str) -> Arrival | None:
        """When a member that fetches is going to hold the version, if the others can train on until then."""
        others = (self.roster.members.get(x) for x in self.proposals)
        if self.batch_shares is not None or any(x is not None and x.leaving for x in others):
            return None
        return self.catch_up.arrival(replica)

    def _release_for(self, proposers: list[Member], awaited: tuple[str, ...]) -> list[CoordinatorEffect]:
        """The round is held open for members that still fetch."""
        found = self._release(proposers) if awaited else []
        if found and self._held_open != self.at.version:
            self._held_open = self.at.version
            data = {"for": list(awaited)}
            found.append(Emit("held_open", fragment=self.fragment, version=self.at.version + 1, data=data))
        return found

    def _release(self, proposers: list[Member]) -> list[CoordinatorEffect]:
        """Their training threads need not wait for what they have offered; each is told once a round."""
        untold = [x for x in proposers if x.replica not in self._notified_train_on and x.conn is not None]
        self._notified_train_on |= {x.replica for x in untold}
        return [SendTo(x.conn, m.TrainOn(self.fragment)) for x in untold if x.conn is not None]

    def _form(self, now: float, proposers: list[Member]) -> list[CoordinatorEffect]:
        """Starts an attempt with all who have proposed and reach each other (step 2's end)."""
        free = [x for x in proposers if not x.busy(now, self.sync.dead_after_s)]
        members = self._membership.choose(now, free)
        if len(members) < self.sync.min_replicas:  # better a quorum that may fail than none
            members = free
        if not members or (len(members) < self.sync.min_replicas and not self._retry):
            return self._release(proposers)
        if self.batch_shares is not None and not self.batch_shares.covers(members, self.proposals):
            return []
        chosen = {x.replica: self.proposals[x.replica] for x in members}
        odd = outliers(chosen, self.sync.outlier_ratio if self.batch_shares is None else None)
        chosen |= {replica: excluded(chosen[replica]) for replica in odd}
        contributors = [c for c in chosen.values() if c.weight > 0]
        spent = self.grants is not None and self.grants.spent(chosen)
        if not contributors and self.batch_shares is None and not spent:
            return self._void(members)
        self.attempts += 1
        a = self.attempt = Attempt(
            attempt=self.numbers.next(),
            version=self.at.version + 1,
            members=tuple(x.incarnation_id for x in members),
            contributions=chosen,
            drop=tuple(sorted(self.undropped.items())),
            advance=max(c.steps for c in contributors or chosen.values()),
            started_s=now,
        )
        if self.grants is not None:
            a.ranges = self.grants.hold(chosen.values())
        if self.batch_shares is not None and self.batch_shares.plan is not None:
            a.ranges, a.plan = self.batch_shares.plan.batch, self.batch_shares.plan.number
        key = tuple((x.incarnation_id, x.conn) for x in members)
        if key != self._group_key:
            self._group, self._group_key = a.attempt, key
        data = {"members": [list(x) for x in a.members], "retry": self._retry}
        effects = [self._tell("quorum", a, **data, steps=[c.steps for c in chosen.values()])]
        for x in members:
            if reason := odd.get(x.replica):
                data = {"reason": reason, "norm": self.proposals[x.replica].norm}
                effects.append(Emit("outlier", *x.incarnation_id, self.fragment, a.version, a.attempt, data=data))
        for rank, member in enumerate(members):
            effects += self._invite(member, rank, a, odd.get(member.replica, ""))
        return effects

    def _invite(self, member: Member, rank: int, a: Attempt, outlier: str) -> list[CoordinatorEffect]:
        if member.conn is None:
            return []
        f = self.fragment
        member.newcomer.discard(f)
        member.catching_up.discard(f)
        before, member.told[f] = member.told.get(f, ()), a.members
        last_step = self.proposals[member.replica].last_step
        return [SendTo(member.conn, a.invitation(f, self._group, rank, before, last_step=last_step, outlier=outlier))]

    def _void(self, members: list[Member]) -> list[CoordinatorEffect]:
        effects: list[CoordinatorEffect] = [
            SendTo(x.conn, m.Void(self.fragment)) for x in members if x.conn is not None
        ]
        self._membership.taken({x.incarnation_id for x in members}, self.proposals)
        for x in members:
            x.newcomer.discard(self.fragment)  # once is enough: it would be called in again at once
            del self.proposals[x.replica]
        rest = dict(self.proposals)
        self._new_round()
        self.proposals.update(rest)
        return [*effects, Emit("void", fragment=self.fragment, version=self.at.version + 1)]

    # ------------------------------------------------------------ step 5

    def _overdue_s(self, a: Attempt) -> float:
        """When the attempt is given up, if there is anybody to go on with."""
        others = a.prepared or self.proposals.keys() - a.contributions.keys()
        if self.batch_shares is not None and not others:  # who has no share can propose nothing, and would be given one
            others = {x.replica for x in self._able(self._stepped_s) if not x.leaving} - a.contributions.keys()
        alone = len(a.members) == 1
        patience_s = self.sync.grace_s + self.sync.dead_after_s if a.prepared or alone else self.sync.gone_after_s
        return a.overdue_s(self.roster, patience_s, self._usual_s) if others else math.inf

    def _quiet_s(self, a: Attempt) -> float:
        """When the next member counts as quiet; what has passed was looked at and changes nothing by itself."""
        due = (x.quiet_from_s(self.sync) for x in a.silent(self.roster))
        return min((x for x in due if x > self._stepped_s), default=math.inf)

    def _quiet(self, now: float, a: Attempt) -> list[Member]:
        """Members that keep the others waiting and whose heartbeats have stopped, if the others are enough without
        them."""
        quiet = [x for x in a.silent(self.roster) if now >= x.quiet_from_s(self.sync)]
        if not quiet:
            return []
        able = [x for x in self.roster.connected() if x.replica in self.proposals and x not in quiet]
        enough = sum(not x.busy(now, self.sync.dead_after_s) for x in able) >= self.sync.min_replicas
        return quiet if enough else []

    def _decide(self, now: float) -> list[CoordinatorEffect]:
        a = self.attempt
        if a is None:
            return []
        verdict = a.verdict()
        if verdict is None:
            return self._give_up(now, a)
        if isinstance(verdict, Failure):
            return self._abort(now, verdict.reason)
        if isinstance(verdict, RoundOutcome):
            return self._commit(verdict.digest)
        effects = [self._tell("mismatch", a, digests=dict(a.prepared), votes=dict(Counter(a.prepared.values())))]
        if verdict.majority:
            effects += self._abort(now, "the digests differ")
            return effects + self._put_out(a, verdict.majority)
        self._ties += 1
        if self._ties < 2:
            return effects + self._abort(now, "the digests differ")
        return effects + self._commit(a.prepared[a.alive()[0]])

    def _give_up(self, now: float, a: Attempt) -> list[CoordinatorEffect]:
        """Whoever keeps the others waiting sits out until its reducer is free: it has not prepared for long, or is not
        heard at all. The others go on."""
        if now >= self._overdue_s(a):
            out = a.silent(self.roster)
            for x in out:
                x.late += 1
            reason = f"no result after {now - a.started_s:.1f} s"
        elif out := self._quiet(now, a):
            for x in out:
                x.quiet += 1
            reason = f"no heartbeat for {now - min(x.heard_s for x in out):.2f} s, and no result"
        else:
            return []
        for x in out:
            x.busy_since_s = -math.inf
        return self._abort(now, f"{', '.join(x.replica for x in out)}: {reason}")

    def _put_out(self, a: Attempt, majority: str) -> list[CoordinatorEffect]:
        """Who disagrees twice with the majority heals before it takes part again."""
        effects: list[CoordinatorEffect] = []
        for replica in (replica for replica, digest in a.prepared.items() if digest != majority):
            self._strikes[replica] += 1
            member = self.roster.members.get(replica)
            if self._strikes[replica] >= 2 and member is not None:
                member.held.pop(self.fragment, None)
                self.withdraw(replica)
                self.catch_up.add(replica, heal=True)
                effects.append(Emit("evicted", *member.incarnation_id, self.fragment, a.version, a.attempt))
        return effects

    def _abort(self, now: float, reason: str) -> list[CoordinatorEffect]:
        a = self.attempt
        assert a is not None
        for x in a.silent(self.roster):
            x.busy_since_s = now if x.busy_since_s is None else x.busy_since_s
        self.attempt, self._retry, self._group_key = None, True, None
        self.aborted += 1
        if self.grants is not None:
            self.grants.release()
        message = m.Abort(self.fragment, a.attempt, reason)
        return [self._tell("abort", a, reason=reason), *self._send(a.members, message)]

    def _commit(self, digest: str) -> list[CoordinatorEffect]:
        a = self.attempt
        assert a is not None
        granted, done = self._mark_done(a)
        d = a.decided(self.at, digest, self.inner_step, done)
        self.attempt, self.last, self.inner_step = None, d, d.inner_step
        self._usual_s = a.reported_s - a.started_s
        if not self._retry:
            self._pace.learn(self._waiting.quorum_s, self._usual_s)
        self.at = m.Position(self.fragment, a.version, d.chain)
        self.history[a.version] = d.chain
        self.history.pop(a.version - HISTORY, None)
        self.undropped = {r: i for r, i in self.undropped.items() if (r, i) not in a.drop}
        self._overtake(a)
        holders = tuple(incarnation_id for incarnation_id in a.members if a.prepared[incarnation_id[0]] == digest)
        for incarnation_id in a.members:
            member = self.roster.members.get(incarnation_id[0])
            if member is not None and member.incarnation_id == incarnation_id:
                member.counted = (member.counted or {}) | {self.fragment: a.version}
                if a.prepared[incarnation_id[0]] == digest:
                    member.held[self.fragment] = self.at
        for member in self.roster.connected():
            if not self.holds(member):
                self.catch_up.add(member.replica)
        if a.lost:
            self._group_key = None
        self._partitions.met(a.members)
        self._membership.taken(a.incarnation_ids, self.proposals)
        self._new_round()
        data: dict[str, Any] = {
            "members": [list(x) for x in d.members],
            "digest": digest,
            "chain": d.chain,
            "away": sorted(a.lost),
        }
        if self.grants is not None or self.batch_shares is not None:
            data["ranges"] = {r: list(c.ranges) for r, c in a.contributions.items() if c.ranges}
            data["done_to"] = low_water(done)
        message = m.Commit(self.fragment, a.version, a.attempt, digest, d.chain)
        tell = self._tell("decide", a, inner_step=d.inner_step, **data)
        return [d, tell, *self._send(holders, message), *granted]

    def _overtake(self, a: Attempt) -> None:
        """Who came to hold the version when the attempt had begun could not take part: the next quorum waits for it."""
        f, before = self.fragment, a.version - 1
        for x in self.roster.connected():
            held = x.held.get(f)
            came_late = f in x.newcomer and x.called_in.get(f) != a.version
            if came_late and x.incarnation_id not in a.incarnation_ids and held is not None and held.version == before:
                x.catching_up.add(f)

    def _mark_done(self, a: Attempt) -> tuple[list[CoordinatorEffect], Ranges]:
        """DONE: what follows, and all units that are done by now."""
        if self.batch_shares is not None:
            return self.batch_shares.commit()
        if self.grants is None:
            return [], ()
        found = [self.roster.members.get(replica) for replica, _ in a.members]
        effects = self.grants.commit([x for x in found if x is not None and x.incarnation_id in a.members], a.ranges)
        return effects, self.grants.ledger.done

    def _send(
        self, incarnation_ids: tuple[m.IncarnationId, ...], message: m.FromCoordinator
    ) -> list[CoordinatorEffect]:
        found = [(self.roster.members.get(incarnation_id[0]), incarnation_id) for incarnation_id in incarnation_ids]
        return [
            SendTo(x.conn, message)
            for x, incarnation_id in found
            if x and x.incarnation_id == incarnation_id and x.conn is not None
        ]

    def _tell(self, event: str, a: Attempt, **data: Any) -> CoordinatorEffect:
        return Emit(
            event,
            fragment=self.fragment,
            version=a.version,
            attempt=a.attempt,
            inner_step=self.inner_step,
            data=data,
        )
