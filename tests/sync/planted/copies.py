"""Bugs in what a newcomer takes over of a dead replica (ADOPT); see `tests.sync.planted.rules`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.backups import Neighbours
from ftopt.sync.protocol.coordinator.grants import Lending
from ftopt.sync.protocol.coordinator.members import Members
from ftopt.sync.protocol.coordinator.roster import Member

Patch = pytest.MonkeyPatch


def stale_copy(patch: Patch) -> None:
    """A copy is good although a later contribution of its replica is in a commit."""
    source_of = Neighbours.source_of

    def mutant(self: Neighbours, member: Member) -> Any:
        return source_of(self, replace(member, counted={}))

    patch.setattr(Neighbours, "source_of", mutant)


def heir_in_an_attempt(patch: Patch) -> None:
    """A newcomer takes over what an attempt under way may still count."""
    heritage = Members.heritage

    def mutant(self: Members, member: Member) -> Any:
        attempts, lending = [r.attempt for r in self.rounds], self.lending
        under_way = lending.ledger.under_way if lending is not None else ()
        for r in self.rounds:
            r.attempt = None
        if lending is not None:
            lending.ledger.under_way = ()
        found = heritage(self, member)
        for r, attempt in zip(self.rounds, attempts, strict=True):
            r.attempt = attempt
        if lending is not None:
            lending.ledger.under_way = under_way
        return found

    patch.setattr(Members, "heritage", mutant)


def adopted_and_free(patch: Patch) -> None:
    """What a newcomer takes over is free as well."""
    admit = Lending.admit

    def mutant(self: Lending, member: Member, hello: m.Hello) -> Any:
        return admit(self, member, hello if hello.incarnation else replace(hello, claim=()))

    patch.setattr(Lending, "admit", mutant)
