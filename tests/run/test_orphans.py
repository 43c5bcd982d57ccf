"""A run whose runner is killed: its processes end, whatever they are at."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines
from tests.run.running import Start, alive, events_of, folder_of, until

_SOON_S = 60.0
"""Of which a replica has 10 s; the rest is for a busy machine."""


def spawned(folder: RunFolder) -> list[int]:
    return [event["data"]["pid"] for event in read_lines(folder.events) if event["event"] == "spawn"]


@pytest.mark.long
def test_processes_that_are_still_starting_end_with_their_runner(tmp_path: Path, start: Start) -> None:
    for attempt in range(10):  # in one that is looked at late they have started
        folder = tmp_path / str(attempt)
        folder.mkdir()
        run = start(folder, "replicas=2", fresh=True)
        until(lambda folder=folder: any(folder.glob("runs/*")) and len(spawned(folder_of(folder))) == 3)  # type: ignore[misc]
        run.signal(signal.SIGKILL)
        pids = spawned(folder_of(folder))
        until(lambda pids=pids: not any(map(alive, pids)), _SOON_S)  # type: ignore[misc]
        if events_of(folder, "join") == []:
            return
    raise AssertionError("all runs had joined before they were killed")


@pytest.mark.long
def test_a_replica_that_cannot_leave_ends_with_its_runner(tmp_path: Path, start: Start) -> None:
    """It waits for the others, who are stopped."""
    run = start(tmp_path, "replicas=2", "train.inner_steps=100000")
    until(lambda: any(tmp_path.glob("runs/*")) and len(events_of(tmp_path, "decide")) > 0)
    coordinator, other, *rest = spawned(folder_of(tmp_path))
    for pid in (coordinator, other):
        os.kill(pid, signal.SIGSTOP)
    run.signal(signal.SIGKILL)
    until(lambda: not any(map(alive, rest)), _SOON_S)
    for pid in (coordinator, other):
        os.kill(pid, signal.SIGCONT)
    until(lambda: not any(map(alive, (coordinator, other))), _SOON_S)
