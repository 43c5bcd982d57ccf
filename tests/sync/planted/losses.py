"""Bugs in what ends a job whose loss of a replica matters (LOSS); see `tests.sync.planted.rules`."""

from __future__ import annotations

from typing import Any

import pytest

from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.members.losses import Losses
from ftopt.sync.protocol.coordinator.roster.roster import Member

Patch = pytest.MonkeyPatch


def revived_job(patch: Patch) -> None:
    """A coordinator that is started again goes on with a job that has failed."""
    true = Coordinator.__init__

    def init(self: Coordinator, *given: Any, **named: Any) -> None:
        true(self, *given, **named)
        self.failed = None

    patch.setattr(Coordinator, "__init__", init)


def finished_is_lost(patch: Patch) -> None:
    """Who has come to its end is lost like anybody when its connection ends."""
    true = Losses._due_s

    def due_s(self: Losses, member: Member) -> float:
        finished, member.finished = member.finished, False
        try:
            return true(self, member)
        finally:
            member.finished = finished

    patch.setattr(Losses, "_due_s", due_s)
