"""Planted bugs: training threads that stand still for longer than they may."""

from __future__ import annotations

import math

import pytest

from ftopt.sync.protocol.coordinator.catch_up import CatchUp

Patch = pytest.MonkeyPatch


def never_released(patch: Patch) -> None:
    """A training thread waits for the newest version for as long as it takes to fetch it."""
    patch.setattr(CatchUp, "_release_s", lambda self, now, lack: math.inf)
