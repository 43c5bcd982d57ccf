"""The processes of a benchmark are gone when it ends, whenever that is."""

from __future__ import annotations

import pytest

from benchmarks.speed import crew
from tests.forkserver import CONTEXT


def test_an_exit_while_processes_are_started_is_that_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def exits(_member: object) -> None:
        raise SystemExit(143)  # as SIGTERM does

    monkeypatch.setattr(CONTEXT.Process, "start", exits)
    with pytest.raises(SystemExit, match="143"):
        crew.together(print, 2)
