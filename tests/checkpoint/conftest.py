"""Fixtures of this folder."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed loses nothing that it has written; what a loss of power leaves is simulated."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
