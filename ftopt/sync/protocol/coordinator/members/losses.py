"""LOSS: with ``policy.on_loss: fail`` the first replica that is lost ends the job for all.

A replica is lost if it was let in, has not finished, and

- is away for ``dead_after_s`` while another replica is here; or for ``recovery_s`` (``evict_after_s`` if that is
  shorter) if a restarted coordinator has never heard it;
- comes back as another incarnation: its process has died, or its steps were dropped;
- is evicted at the end of the data, or is on another branch;
- has left, ``dead_after_s`` ago, and another replica trains on: a signal to all replicas reaches each in a different
  step, and is no loss. To a restarted coordinator, it left at the restart. If a replica resumes a checkpoint, it does
  not count: then all were stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, LeftEarly
from ftopt.sync.protocol.coordinator.roster.listener import Listener
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster
from ftopt.sync.protocol.policy import FaultPolicy

_LEFT = "it has left before its end"


@dataclass(frozen=True, slots=True)
class Lost:
    """A lost replica, its last known inner step, and why it counts as lost."""

    incarnation_id: m.IncarnationId
    inner_step: int
    why: str


class Losses(Listener):
    """Finds the first lost replica; does nothing with ``on_loss: go_on``."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._policy = FaultPolicy()
        self._at_once: Lost | None = None
        self._left: tuple[float, Lost] | None = None

    def define(self, policy: FaultPolicy) -> None:
        self._policy, self._at_once = policy, None

    def remember(self, now: float, left: LeftEarly) -> None:
        """Takes over the journal's entry."""
        self._left = now, Lost((left.replica, left.incarnation), left.inner_step, _LEFT)

    @property
    def matter(self) -> bool:
        """Whether a loss ends the job."""
        return self._policy.on_loss == "fail"

    def given_up(self, member: Member, why: str) -> None:
        """Makes a member lost at once, whoever is here."""
        if self.matter and not member.finished and self._at_once is None:
            self._at_once = _lost(member, why)

    def left(self, now: float, member: Member) -> Effects:
        if not self.matter or member.finished or self._left is not None:
            return []
        self._left = now, _lost(member, _LEFT)
        return [LeftEarly(*member.incarnation_id, member.inner_step)]

    def resumed(self) -> Effects:
        """Forgets the early leaver, since a replica resumes a checkpoint during startup."""
        if self._left is None:
            return []
        self._left = None
        return [LeftEarly("")]

    def first(self, now: float, absent: Sequence[Member]) -> Lost | None:
        """The loss that ends the job now. ``absent``: members that are away, while others are here to miss them."""
        if not self.matter:
            return None
        if not self._roster.members:
            self._left = None  # all have left
        if self._at_once is not None:
            return self._at_once
        for member in absent:
            if now >= self._due_s(member):
                never = member.counted is None
                why = "the coordinator was started again, and it has not come back" if never else "it does not answer"
                return _lost(member, f"{why} for {self._due_s(member) - member.lost_s:.3g} s")
        if self._left is not None and self._others_train() and now >= self._left[0] + self._policy.dead_after_s:
            return self._left[1]
        return None

    def next_s(self, after: float, absent: Sequence[Member]) -> float:
        """When time alone ends the job. ``after``: the time of the last look."""
        due = [self._due_s(x) for x in absent]
        if self._left is not None and self._others_train():
            due.append(self._left[0] + self._policy.dead_after_s)
        return max(after + 0.01, min(due)) if due else math.inf

    def _due_s(self, member: Member) -> float:
        """When a member that is away counts as lost."""
        policy, never = self._policy, member.counted is None
        if member.finished:
            return math.inf
        if member.in_doubt:  # it reads a checkpoint
            return member.lost_s + policy.evict_after_s
        return member.lost_s + (min(policy.derived.recovery_s, policy.evict_after_s) if never else policy.dead_after_s)

    def _others_train(self) -> bool:
        return any(not (x.leaving or x.finished) for x in self._roster.connected())


def _lost(member: Member, why: str) -> Lost:
    return Lost(member.incarnation_id, member.inner_step, why)
