"""Planted bugs: training threads that stand still for longer than they may."""

from __future__ import annotations

import math
from collections.abc import Collection, Container

import pytest

from ftopt.sync.protocol.coordinator.entry.admission import Contenders
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.sync.protocol.coordinator.rounds.catch_up import CatchUp
from ftopt.sync.protocol.coordinator.rounds.decide import Decide
from ftopt.sync.protocol.coordinator.rounds.gather import Gather
from ftopt.sync.protocol.coordinator.rounds.suspects import Suspects
from ftopt.sync.protocol.coordinator.rounds.waiting import Waiting

Patch = pytest.MonkeyPatch


def never_released(patch: Patch) -> None:
    """A training thread waits for the newest version for as long as it takes to fetch it."""
    patch.setattr(CatchUp, "_release_s", lambda self, now, lack: math.inf)


def nobody_is_blamed(patch: Patch) -> None:
    """A failure that names no peer is held against nobody"""
    patch.setattr(Suspects, "failed", lambda self, *_, **__: {})


def holder_superseded(patch: Patch) -> None:
    """The silent process that alone holds a version is superseded as any other one is"""
    patch.setattr(Contenders, "awaits", lambda self, rival, hello, since_s: False)


def dead_holders_count(patch: Patch) -> None:
    """A silent process is superseded since others hold its version too, which have died a moment before"""
    awaits = Contenders.awaits
    patch.setattr(Contenders, "awaits", lambda self, rival, hello, since_s: awaits(self, rival, hello, -math.inf))


def late_for_ever(patch: Patch) -> None:
    """Who has lost a share for coming late gets no other one, although nobody else could compute it"""
    able = Gather.able

    def mutant(self: Gather, now: float, *, but: Container[str] = ()) -> list[Member]:
        return [x for x in able(self, now, but=but) if x.replica not in self._late]

    patch.setattr(Gather, "able", mutant)


def waits_outside(patch: Patch) -> None:
    """Who is in no attempt stands still for one whose members' reducers all hang"""
    patch.setattr(Decide, "_release", lambda self, now, a: [])


def waited_for_nothing(patch: Patch) -> None:
    """At the end of the data it counts against a replica that its peers have kept it waiting"""
    patch.setattr(Gather, "_end_waits", lambda self, now, replicas: None)


def fetchers_open_rounds(patch: Patch) -> None:
    """Leavers wait for a replica that fetches to open their round, for as long as its fetch takes."""

    def mutant(self: Waiting, now: float, proposers: Collection[Member], missing: Collection[Member]) -> bool:
        if missing and all(x.state == "out_of_units" for x in missing):
            return True
        return not all(x.leaving or self._early(now, x) for x in proposers)

    patch.setattr(Waiting, "_begins", mutant)


def idle_open_rounds(patch: Patch) -> None:
    """Leavers and slow replicas wait for those that have run out of units to open their round."""

    def mutant(self: Waiting, now: float, proposers: Collection[Member], missing: Collection[Member]) -> bool:
        if missing and not any(map(self._versions.held_by, missing)):
            return True
        return not all(x.leaving or self._early(now, x) for x in proposers)

    patch.setattr(Waiting, "_begins", mutant)
