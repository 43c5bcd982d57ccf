"""Bugs in whose places spares take (SPARE); see `tests.sync.planted.rules`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ftopt.sync.protocol.coordinator.members.spares import Spares
from ftopt.sync.protocol.coordinator.roster.effects import JournalState
from ftopt.sync.protocol.coordinator.roster.roster import Member

Patch = pytest.MonkeyPatch


def replaced_again(patch: Patch) -> None:
    """Who was lost is replaced by each spare that is there"""

    def absent(self: Spares) -> Iterator[Member]:
        return (x for x in self._roster.away() if not x.standby)

    patch.setattr(Spares, "_absent", absent)


def promotion_forgotten(patch: Patch) -> None:
    """A coordinator that is started again does not know whose places spares have taken"""
    remember = Spares.remember

    def mutant(self: Spares, saved: JournalState) -> None:
        remember(self, replace(saved, replaced=()))

    patch.setattr(Spares, "remember", mutant)
