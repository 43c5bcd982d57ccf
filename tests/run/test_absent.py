"""Replicas that stay away while others have come to the end of a launched script."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftopt.run.processes import Child
from ftopt.run.scripts import absent
from ftopt.run.scripts.absent import Absent
from ftopt.run.scripts.ends import Ends
from ftopt.watch.folder import RunFolder
from ftopt.watch.sentences import Note


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Launched:
    """A launch whose replica r0 has come to the end, with a process of r1."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[Note] = []
        self.clock = Clock()
        monkeypatch.setattr(absent, "time", self.clock)
        command = [sys.executable, "-c", "input()"]
        self.child = Child("r1", command, log=path / "log", life=1, env={})
        self.folder = RunFolder(path)
        self.folder.log("r1").parent.mkdir(parents=True, exist_ok=True)
        ends = Ends(self.folder)
        self.says = ends.begin("r1")
        self.absent = Absent(self.notes.append, lambda: 20.0, ends.has_left)
        self.hear("spawn")

    def hear(self, event: str) -> None:
        self.absent.hear({"event": event, "replica": "r1"})

    def later(self, seconds: float) -> int | None:
        """Time passes; returns how the process has ended."""
        self.clock.now_s += seconds
        self.absent.end([self.child])
        return self.child.process.poll()


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    found = Launched(tmp_path, monkeypatch)
    yield found
    found.child.end(0.0)


@pytest.mark.parametrize("joined", [True, False])
def test_one_that_is_away_is_killed_after_evict_after_s_and_not_unsaid(launched: Launched, joined: bool) -> None:
    if joined:
        launched.hear("join")
        launched.hear("lost")
    launched.later(0.0)
    assert launched.later(10.0) is None
    (note,) = launched.notes
    assert f"r1 {'is cut off' if joined else 'has not joined'}, as when its process is stopped" in note.text
    assert "waits for it, 10 s at most (policy.evict_after_s)" in note.text
    assert launched.later(9.0) is None and len(launched.notes) == 1
    assert launched.later(1.0) == -signal.SIGKILL
    assert launched.notes[-1].text == "r1 was away for 20 s, and is killed"


def test_one_that_trains_or_comes_back_is_left_alone(launched: Launched) -> None:
    launched.hear("join")
    assert launched.later(1000.0) is None and not launched.notes
    launched.hear("lost")
    assert launched.later(10.0) is None and len(launched.notes) == 1
    launched.hear("return")
    assert launched.later(1000.0) is None and len(launched.notes) == 1


def test_one_that_was_cut_off_and_has_ended_its_training_may_evaluate_for_long(launched: Launched) -> None:
    """It was told that the job had ended meanwhile."""
    launched.hear("join")
    launched.hear("lost")
    launched.says.write_text('{"early": false, "steps": 40, "pending": 0}', encoding="utf-8")
    assert launched.later(0.0) is None and launched.later(1000.0) is None and not launched.notes
