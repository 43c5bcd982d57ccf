"""The rounds of one fragment, coordinator side: gather with grace and call-in, attempts, decisions.

A round gathers proposals towards ``version + 1``. When nobody needs to be waited for any more, an *attempt* with a fixed
quorum starts. It commits when every member has prepared with the same digest, or has died after preparing with it, and
one of them is alive to hold the result; it aborts when a member fails or is lost before it prepared. After an abort the
survivors, and whoever has proposed since, go straight to the next attempt with the same contributions.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.effects import Decided, Effect, Send, Tell

if TYPE_CHECKING:
    from ftopt.sync.protocol.roster import Member, Roster
    from ftopt.sync.protocol.settings import Sync


@dataclass
class Attempt:
    """One try of a round by a fixed set of members, ranked by id."""

    attempt: int
    version: int
    members: tuple[m.Mark, ...]
    conns: dict[str, int]
    contributions: dict[str, m.Contribution]
    drop: tuple[m.Mark, ...]
    advance: int
    prepared: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    @property
    def replicas(self) -> list[str]:
        return [replica for replica, _ in self.members]


class Rounds:
    """Everything the coordinator knows of one fragment."""

    HISTORY = 1000
    """Chains of past versions that are kept, to tell a fork from lateness."""

    def __init__(self, fragment: int, roster: Roster, sync: Sync, numbers: Numbers) -> None:
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
        self._stepped_s = 0.0
        self._group = 0
        self._group_key: object = None
        self._reset()

    def _reset(self) -> None:
        self._opened_s: float | None = None
        self._deadline: dict[str, float] = {}
        self._told_train_on: set[str] = set()
        self._retry = False
        self._retry_s = 0.0
        self._failures = 0
        self._strikes: Counter[str] = Counter()
        self._ties = 0
        self._cuts: Counter[frozenset[str]] = Counter()
        self._sitting_out: set[str] = set()

    # ------------------------------------------------------------ state

    def restore(self, at: m.Position, inner_step: int) -> None:
        """Takes ``at`` as the truth: after a start, a restart or a rollback."""
        self.at, self.inner_step = at, inner_step
        self.history[at.version] = at.chain
        self.proposals.clear()
        self.attempt = None
        self._group_key = None
        self._reset()

    def holds(self, member: Member) -> bool:
        return member.held.get(self.fragment) == self.at

    def behind(self, member: Member, *, heal: bool = False) -> list[Effect]:
        """Tells a connected member to fetch the current state."""
        if member.conn is None:
            return []
        member.newcomer.add(self.fragment)
        sources = self.roster.sources(self.at, but=member.replica)
        return [Send(member.conn, m.Behind(self.at, sources, heal))]

    # ------------------------------------------------------------ inputs

    def propose(self, member: Member, contribution: m.Contribution) -> list[Effect]:
        """Step 1: a proposal counts only from a holder of the version that it builds on (I5)."""
        if not self.holds(member) or contribution.version != self.at.version:
            return [] if self.holds(member) else self.behind(member)
        known = self.proposals.get(member.replica)
        if known is not None and known != contribution:
            return [Tell("frozen", member.replica, member.incarnation, self.fragment, self.at.version + 1)]
        self.proposals[member.replica] = contribution
        member.stalled_at = None
        return []

    def withdraw(self, replica: str) -> None:
        """The replica is away: it offers its contribution again in its next hello."""
        self.proposals.pop(replica, None)
        self._deadline.pop(replica, None)
        self._told_train_on.discard(replica)

    def lose(self, replica: str) -> None:
        """A connection is lost, or a replica is gone."""
        self.withdraw(replica)
        if self.attempt and replica in self.attempt.contributions:
            self.attempt.lost.add(replica)

    def find(self, replica: str, mark: m.PreparedMark) -> None:
        """A member is back in the attempt that it had prepared."""
        a = self.attempt
        if a and mark.attempt == a.attempt and a.prepared.get(replica) == mark.digest:
            a.lost.discard(replica)
            member = self.roster.members[replica]
            if member.conn is not None:
                a.conns[replica] = member.conn

    def prepare(self, member: Member, message: m.Prepared) -> None:
        """Step 4."""
        a = self.attempt
        if a and a.attempt == message.attempt and member.mark in a.members and member.replica not in a.lost:
            a.prepared[member.replica] = message.digest

    def fail(self, now: float, member: Member, message: m.Failed) -> list[Effect]:
        """A member could not reduce."""
        a = self.attempt
        if a is None or a.attempt != message.attempt or member.mark not in a.members:
            return []
        if message.peer and message.peer in a.contributions:
            self._cuts[frozenset((member.replica, message.peer))] += 1
            for pair, times in self._cuts.items():
                if times >= 2 and not pair & self._sitting_out:
                    self._sitting_out.add(max(pair))
        self._failures += 1
        self._retry_s = now + min(2.0, 0.05 * 2**self._failures)
        return self._abort(f"{member.replica}: {message.reason}")

    # ------------------------------------------------------------ what follows

    def step(self, now: float) -> list[Effect]:
        """Everything that has become due or decidable."""
        self._stepped_s = now
        effects: list[Effect] = []
        if self.attempt is not None:
            effects += self._decide()
        if self.attempt is None and self.at.version >= 0:
            effects += self._gather(now)
        return effects

    def deadline_s(self) -> float:
        """When `step` is to be called at the latest, if nothing happens before."""
        if self.attempt is not None or not self.proposals:
            return math.inf
        due = [t for r, t in self._deadline.items() if r not in self.proposals]
        if self._retry:
            due.append(self._retry_s)
        if self._opened_s is not None:
            due.append(self._opened_s + self.sync.grace_s)
        return min((t for t in due if t > self._stepped_s), default=math.inf)

    def _gather(self, now: float) -> list[Effect]:
        proposers = [x for x in self.roster.connected() if x.replica in self.proposals]
        if not proposers:
            self._opened_s, self._retry = None, False
            return []
        if self._retry:
            return self._form(now, proposers) if now >= self._retry_s else []
        if self._opened_s is None and not all(x.leaving for x in proposers):
            self._opened_s = now
        active = [x for x in self.roster.connected() if self.holds(x) and not x.leaving and not x.stalled]
        missing = [x for x in active if x.replica not in self.proposals]
        missing += [
            x for x in self.roster.connected() if self.fragment in x.catching_up and not self.holds(x)
        ]
        if self._opened_s is None:  # leavers alone wait for a round, unless nobody is left to open one
            return self._form(now, proposers) if not missing else []
        effects: list[Effect] = []
        late = now >= self._opened_s + self.sync.grace_s
        for member in missing:
            if member.replica not in self._deadline and (
                late or (self.fragment in member.newcomer and self.holds(member))
            ):
                # Only a trainer at work can be waited for beyond the grace; other states are not hung, but not ready.
                patience = member.patience_s() if member.state == "training" else 0.0
                self._deadline[member.replica] = max(now + patience, now if late else self._opened_s + 0.5)
                effects += self._call_in(member) if self.holds(member) else []
        waiting = [x for x in missing if now < self._deadline.get(x.replica, math.inf)]
        if waiting:
            return effects
        for member in missing:
            if member.state == "training" and self.holds(member) and self.fragment not in member.newcomer:
                member.stalled_at = member.inner_step
                effects.append(
                    Tell("stalled", member.replica, member.incarnation, self.fragment, self.at.version + 1)
                )
        return effects + self._form(now, proposers)

    def _call_in(self, member: Member) -> list[Effect]:
        if member.conn is None:
            return []
        version = self.at.version + 1
        return [
            Send(member.conn, m.CallIn(self.fragment, version)),
            Tell("call_in", member.replica, member.incarnation, self.fragment, version),
        ]

    def call_in_everyone(self) -> list[Effect]:
        """For triggers that mean now."""
        effects: list[Effect] = []
        for member in self.roster.connected():
            if self.holds(member) and member.replica not in self.proposals:
                effects += self._call_in(member)
        return effects

    def _form(self, now: float, proposers: list[Member]) -> list[Effect]:
        """Starts an attempt with all who have proposed (step 2's end)."""
        members = [x for x in proposers if x.replica not in self._sitting_out] or proposers
        if len(members) < self.sync.min_replicas and not self._retry:
            untold = [x for x in members if x.replica not in self._told_train_on and x.conn is not None]
            self._told_train_on |= {x.replica for x in untold}
            return [Send(x.conn, m.TrainOn(self.fragment)) for x in untold if x.conn is not None]
        chosen = {x.replica: self.proposals[x.replica] for x in members}
        contributors = [c for c in chosen.values() if c.weight > 0]
        if not contributors:
            return self._void(members)
        self.attempts += 1
        attempt = self.numbers.next()
        key = tuple((x.mark, x.conn) for x in members)
        if key != self._group_key:
            self._group, self._group_key = attempt, key
        a = self.attempt = Attempt(
            attempt=attempt,
            version=self.at.version + 1,
            members=tuple(x.mark for x in members),
            conns={x.replica: x.conn for x in members if x.conn is not None},
            contributions=chosen,
            drop=tuple(sorted(self.undropped.items())),
            advance=max(c.steps for c in contributors) if self.fragment == 0 else 0,
        )
        total = math.fsum(c.weight for c in contributors)
        data = {
            "members": [list(x) for x in a.members],
            "retry": self._retry,
            "steps": [c.steps for c in chosen.values()],
        }
        effects: list[Effect] = [
            Tell(
                "quorum",
                fragment=self.fragment,
                version=a.version,
                attempt=attempt,
                inner_step=self.inner_step,
                data=data,
            )
        ]
        for rank, member in enumerate(members):
            if member.conn is None:
                continue
            member.newcomer.discard(self.fragment)
            member.catching_up.discard(self.fragment)
            before = member.told.get(self.fragment, ())
            member.told[self.fragment] = a.members
            quorum = m.Quorum(
                fragment=self.fragment,
                version=a.version,
                attempt=attempt,
                group=self._group,
                rank=rank,
                size=len(members),
                total_weight=total,
                contributors=len(contributors),
                advance=a.advance,
                joined=tuple(sorted(set(a.members) - set(before))),
                left=tuple(sorted(set(before) - set(a.members))),
                drop=a.drop,
            )
            effects.append(Send(member.conn, quorum))
        return effects

    def _void(self, members: list[Member]) -> list[Effect]:
        effects: list[Effect] = []
        for member in members:
            self.proposals.pop(member.replica, None)
            if member.conn is not None:
                effects.append(Send(member.conn, m.Void(self.fragment)))
        self._reset()
        return [*effects, Tell("void", fragment=self.fragment, version=self.at.version + 1)]

    def _decide(self) -> list[Effect]:
        """Step 5."""
        a = self.attempt
        assert a is not None
        if missing := sorted(a.lost - a.prepared.keys()):
            return self._abort(f"{missing[0]} was lost before it had prepared")
        if len(a.prepared) < len(a.members):
            return []
        alive = [r for r in a.replicas if r not in a.lost]
        if not alive:
            return self._abort("all members were lost")
        votes = Counter(a.prepared.values())
        if len(votes) == 1:
            return self._commit(next(iter(votes)))
        digest, count = votes.most_common(1)[0]
        if 2 * count > len(a.members):
            return self._disagree(digest)
        self._ties += 1
        if self._ties < 2:
            return [self._mismatch(votes), *self._abort("the digests differ")]
        return [self._mismatch(votes), *self._commit(a.prepared[alive[0]])]

    def _mismatch(self, votes: Counter[str]) -> Effect:
        a = self.attempt
        assert a is not None
        return Tell(
            "mismatch",
            fragment=self.fragment,
            version=a.version,
            attempt=a.attempt,
            data={"digests": dict(a.prepared), "votes": dict(votes)},
        )

    def _disagree(self, majority: str) -> list[Effect]:
        a = self.attempt
        assert a is not None
        effects = [self._mismatch(Counter(a.prepared.values())), *self._abort("the digests differ")]
        for replica, digest in a.prepared.items():
            if digest == majority:
                continue
            self._strikes[replica] += 1
            member = self.roster.members.get(replica)
            if self._strikes[replica] >= 2 and member is not None:
                member.held.pop(self.fragment, None)
                self.withdraw(replica)
                effects += self.behind(member, heal=True)
        return effects

    def _abort(self, reason: str) -> list[Effect]:
        a = self.attempt
        assert a is not None
        self.attempt, self._retry, self._group_key = None, True, None
        self.aborted += 1
        effects: list[Effect] = [
            Tell(
                "abort",
                fragment=self.fragment,
                version=a.version,
                attempt=a.attempt,
                inner_step=self.inner_step,
                data={"reason": reason},
            )
        ]
        for replica, conn in a.conns.items():
            if replica not in a.lost:
                effects.append(Send(conn, m.Abort(self.fragment, a.attempt, reason)))
        return effects

    def _commit(self, digest: str) -> list[Effect]:
        a = self.attempt
        assert a is not None
        chain = m.next_chain(self.at.chain, self.fragment, a.version, digest)
        decided = Decided(
            fragment=self.fragment,
            version=a.version,
            attempt=a.attempt,
            digest=digest,
            chain=chain,
            inner_step=self.inner_step + a.advance,
            members=tuple(
                (r, i, c.steps, c.last_step, c.weight, c.finite)
                for r, i in a.members
                for c in (a.contributions[r],)
            ),
        )
        self.attempt = None
        self.at, self.inner_step, self.last = (
            m.Position(self.fragment, a.version, chain),
            decided.inner_step,
            decided,
        )
        self.history[a.version] = chain
        self.history.pop(a.version - self.HISTORY, None)
        self.undropped = {r: i for r, i in self.undropped.items() if (r, i) not in a.drop}
        for mark in a.members:
            member = self.roster.members.get(mark[0])
            if member is not None and member.mark == mark and a.prepared[mark[0]] == digest:
                member.held[self.fragment] = self.at
        effects: list[Effect] = [
            decided,
            Tell(
                "decide",
                fragment=self.fragment,
                version=a.version,
                attempt=a.attempt,
                inner_step=decided.inner_step,
                data={
                    "members": [list(x) for x in decided.members],
                    "digest": digest,
                    "chain": chain,
                    "inner_step": decided.inner_step,
                    "away": sorted(a.lost),
                },
            ),
        ]
        for member in self.roster.connected():
            if member.conn is not None and self.holds(member):
                effects.append(
                    Send(member.conn, m.Commit(self.fragment, a.version, a.attempt, digest, chain))
                )
        if a.lost:
            self._group_key = None
        self.proposals.clear()
        self._reset()
        for member in self.roster.connected():
            if not self.holds(member):
                effects += self.behind(member)
        return effects


class Numbers:
    """Attempt numbers, unique in the job: each epoch has a million of its own."""

    def __init__(self, epoch: int) -> None:
        self.restart(epoch)

    def restart(self, epoch: int) -> None:
        self._next = epoch * 1_000_000

    def next(self) -> int:
        self._next += 1
        return self._next
