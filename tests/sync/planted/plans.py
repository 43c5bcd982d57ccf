"""Bugs in the rules of a global batch; see `tests.sync.planted.rules`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.members import batch_shares
from ftopt.sync.protocol.coordinator.members.batch_shares import BatchShares
from ftopt.sync.protocol.coordinator.rounds.rounds import Rounds
from ftopt.sync.protocol.intervals import Ranges, contains
from ftopt.sync.protocol.ledger.plans import BatchPlan, Portion
from ftopt.sync.protocol.replica.machine import Replica

Patch = pytest.MonkeyPatch


def own_off(patch: Patch) -> None:
    """A sum with a unit that is another's by now is kept"""

    def mutant(self: Portion, version: int, plan: int, units: Ranges) -> None:
        if version != self.version:
            self.drop()
        self.version, self.plan, self.units = version, plan, units

    patch.setattr(Portion, "assign", mutant)


def tie_off(patch: Patch) -> None:
    """A sum of another version is kept"""

    def mutant(self: Portion, version: int, plan: int, units: Ranges) -> None:
        if version == self.version and not contains(units, self.kept):
            self.drop()
        self.version, self.plan, self.units = version, plan, units

    patch.setattr(Portion, "assign", mutant)


def any_plan_counts(patch: Patch) -> None:
    """A proposal counts whatever plan it is of"""
    patch.setattr(BatchShares, "fits", lambda self, incarnation_id, contribution: True)


def part_of_a_batch(patch: Patch) -> None:
    """A quorum forms of shares that are not the whole batch"""
    patch.setattr(BatchShares, "covers", lambda self, contributions: True)


def plan_in_an_attempt(patch: Patch) -> None:
    """A plan is issued while an attempt is undecided"""
    step = Rounds.step

    def mutant(self: Rounds, now: float) -> Any:
        return (self.gather.assign(now) if self.attempt is not None else []) + step(self, now)

    patch.setattr(Rounds, "step", mutant)


def stale_shares(patch: Patch) -> None:
    """A plan is issued while an attempt is undecided"""
    plan_in_an_attempt(patch)
    any_plan_counts(patch)
    part_of_a_batch(patch)
    quorum = Replica._quorum

    def mutant(self: Replica, q: m.Quorum) -> Any:
        c = self.fragments[q.fragment].contribution
        return quorum(self, replace(q, plan=c.plan) if c is not None else q)

    patch.setattr(Replica, "_quorum", mutant)


def frozen_under_a_plan(patch: Patch) -> None:
    """A newer plan leaves a contribution outstanding"""

    def mutant(self: Replica, plan: m.Plan) -> Any:
        f = self.fragments[0]
        if f.record is None or plan.version != f.record.version + 1:
            return []
        self.lease.plan = plan
        return [plan]

    patch.setattr(Replica, "_take_plan", mutant)


def all_claims_hold(patch: Patch) -> None:
    """A coordinator that starts leaves all replicas what they report, also what two report"""

    def mutant(version: int, batch: Ranges, claims: Mapping[m.IncarnationId, tuple[int, Ranges]]) -> BatchPlan:
        return BatchPlan(
            0, version, batch, {incarnation_id: units for incarnation_id, (_, units) in claims.items() if units}
        )

    patch.setattr(batch_shares, "restart", mutant)
