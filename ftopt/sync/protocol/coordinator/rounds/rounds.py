"""The rounds of one fragment, coordinator side.

A round gathers proposals towards the version after the current one (`Gather`) until an attempt forms, which is then
decided (`Decide`): a commit makes the next version (`Versions`); after an abort the round goes on gathering.
"""

from __future__ import annotations

import math

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects
from ftopt.sync.protocol.coordinator.roster.roster import Member, send
from ftopt.sync.protocol.coordinator.rounds.attempts import Attempt, AttemptNumbers
from ftopt.sync.protocol.coordinator.rounds.decide import Decide
from ftopt.sync.protocol.coordinator.rounds.gather import Gather


class Rounds:
    """All that the coordinator knows of one fragment."""

    def __init__(self, gather: Gather, numbers: AttemptNumbers) -> None:
        self.gather, self.decide = gather, Decide(gather, numbers)
        self.versions, self.catch_up, self._roster = gather.versions, gather.catch_up, gather.roster
        self.fragment = gather.versions.fragment
        self._stepped_s = -math.inf
        for incarnation_id in self._roster.gone.items():
            self.gone(incarnation_id)

    @property
    def at(self) -> m.Position:
        return self.versions.at

    @property
    def attempt(self) -> Attempt | None:
        return self.decide.attempt

    def restart(self) -> None:
        """Drops all that was under way, after `Versions.restore` has set another version."""
        self.decide.restart()
        self.gather.restart()

    # ------------------------------------------------------------ proposals and reports

    def place(self, member: Member, hello: m.Hello, *, initial_source: bool) -> Effects:
        """Tells a welcomed member its position in the fragment, or makes it fetch the current one."""
        f, versions, last = self.fragment, self.versions, self.versions.last
        found = [self.decide.find(member.replica, x) for x in hello.prepared if x.fragment == f]
        if any(found):
            member.held[f] = versions.at
            return send([member], m.Commit(f, versions.at.version, last.attempt, last.digest, last.chain))
        if initial_source or (last.version == 0 and last.digest == hello.initial != ""):
            member.held[f] = versions.at
            member.comes_to(f, versions.at.version)
            return send([member], m.Start(versions.at, last.inner_step, last.done))
        if not versions.held_by(member):
            self.catch_up.add(member.replica)
            return []
        offers = [c for c in hello.contributions if c.fragment == f]
        if hello.incarnation and not offers:
            member.comes_to(f, versions.at.version)
        told = send([member], m.Behind(versions.at, (), heal=False)) if hello.unplaced else []
        return [*told, *(effect for c in offers for effect in self.gather.propose(member, c))]

    # ------------------------------------------------------------ who takes part

    def withdraw(self, replica: str) -> None:
        self.gather.withdraw(replica)
        self.decide.lose(replica)

    def lose(self, replica: str) -> None:
        """Drops a member that is away or gone; when it is back it proposes its contribution again."""
        self.withdraw(replica)
        self.catch_up.drop(replica)

    def gone(self, incarnation_id: m.IncarnationId) -> None:
        """Makes the next commit drop a gone incarnation from COUNT."""
        replica, incarnation = incarnation_id
        self.decide.undropped[replica] = max(incarnation, self.decide.undropped.get(replica, 0))
        if replica not in self._roster.members:
            self.lose(replica)

    # ------------------------------------------------------------ fetches

    def lacks(self, now: float, member: Member) -> None:
        """Notes that a member could not fetch, or that its state does not fit."""
        f = self.fragment
        member.in_doubt |= member.held.pop(f, None) is not None
        member.maybe_fetched.pop(f, None)
        member.members_sent.pop(f, None)
        self.withdraw(member.replica)
        self.decide.unprepare(member.replica)
        self.catch_up.failed(now, member.replica)

    def fetched(self, now: float, member: Member, position: m.Position) -> None:
        """Notes a complete fetch; if the version has moved on since, the member fetches again."""
        f = self.fragment
        self.catch_up.fetched(now, member.replica)
        known, hope = member.held.get(f), member.maybe_fetched.get(f)
        if known is not None and known.version > position.version:
            return  # sent before the commit of the version that it holds now
        member.held[f] = position
        if hope is not None and hope.version <= position.version:
            del member.maybe_fetched[f]
        if self.versions.held_by(member):
            member.catching_up.discard(f)
        else:
            member.catching_up.add(f)
            self.catch_up.add(member.replica)

    # ------------------------------------------------------------ what follows

    def step(self, now: float) -> Effects:
        """Does everything that has become due or decidable."""
        self._stepped_s = now
        effects = self.decide.step(now)
        if self.attempt is None:
            gathered, formed = self.gather.step(now)
            effects += gathered
            if formed is not None:
                effects += self.decide.begin(now, formed)
        return effects + self.catch_up.step(now, self.at)

    def deadline_s(self) -> float:
        at_work = self.gather if self.attempt is None else self.decide
        return min(self.catch_up.deadline_s(self._stepped_s), at_work.deadline_s(self._stepped_s))
