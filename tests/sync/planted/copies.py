"""Bugs in what a newcomer takes over of a dead replica (ADOPT); see `tests.sync.planted.rules`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.members.backups import Backups
from ftopt.sync.protocol.coordinator.members.grants import Grants
from ftopt.sync.protocol.coordinator.members.members import Members
from ftopt.sync.protocol.coordinator.roster.roster import Member

Patch = pytest.MonkeyPatch


def stale_copy(patch: Patch) -> None:
    """A copy counts as good although a later contribution of its replica is in a commit."""
    source_of = Backups.source_of

    def mutant(self: Backups, member: Member) -> Any:
        return source_of(self, replace(member, counted={}))

    patch.setattr(Backups, "source_of", mutant)


def adopted_in_an_attempt(patch: Patch) -> None:
    """A newcomer adopts what an attempt under way may still count."""
    adopted_work = Members.adopted_work

    def mutant(self: Members, member: Member) -> Any:
        attempts, ledger = [r.attempt for r in self.rounds], self.assignment.ledger
        under_way = ledger.under_way if ledger is not None else ()
        for r in self.rounds:
            r.decide.attempt = None
        if ledger is not None:
            ledger.under_way = ()
        found = adopted_work(self, member)
        for r, attempt in zip(self.rounds, attempts, strict=True):
            r.decide.attempt = attempt
        if ledger is not None:
            ledger.under_way = under_way
        return found

    patch.setattr(Members, "adopted_work", mutant)


def adopted_and_free(patch: Patch) -> None:
    """What a newcomer adopts is free as well."""
    admit = Grants.admitted

    def mutant(self: Grants, member: Member, hello: m.Hello) -> Any:
        return admit(self, member, hello if hello.incarnation else replace(hello, claim=()))

    patch.setattr(Grants, "admitted", mutant)
