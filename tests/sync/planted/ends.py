"""Bugs in how replicas end together (END); see `tests.sync.planted.rules`."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol.coordinator.members.ending import Ending
from tests.simulation.replica import ReplicaProcess

Patch = pytest.MonkeyPatch


def older_version(patch: Patch) -> None:
    """Who is at its end goes although it does not hold the newest version yet."""
    patch.setattr(Ending, "_lacks", lambda self, member: False)


def all_finish(patch: Patch) -> None:
    """Histories in which each replica that leaves has come to its end."""
    true = ReplicaProcess.leave

    def leave(self: ReplicaProcess) -> None:
        if self.alive and not self.leaving:
            self.finish()
            self.waits_s = 20.0
        true(self)

    patch.setattr(ReplicaProcess, "leave", leave)
