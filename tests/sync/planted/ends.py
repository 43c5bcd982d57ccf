"""Bugs in how replicas end together (END); see `tests.sync.planted.rules`."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol.coordinator.ending import Ending

Patch = pytest.MonkeyPatch


def older_version(patch: Patch) -> None:
    """Who is at its end goes although it does not hold the newest version yet."""
    patch.setattr(Ending, "_lacks", lambda self, member: False)
