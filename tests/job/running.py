"""Real runs of a tiny model for tests: the command line in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from ftopt.telemetry.folder import RunFolder
from ftopt.telemetry.jsonl import read

TINY = (
    "replicas=3",
    "model.layers=1",
    "model.heads=2",
    "model.width=16",
    "model.context=16",
    "data.name=text",
    "data.batch_size=4",
    "method.sync_every=20",
    "inner.schedule.warmup=5",
    "train.eval_every=0",
    "log.wandb=off",
    "log.dir=runs",
)


def text(folder: Path) -> str:
    """A text to train on; its override."""
    path = folder / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    return f"data.path={path}"


class Start(Protocol):
    """Starts ``ftopt run diloco_bytes`` in a folder, with `TINY` and then ``overrides``; ended with the test."""

    def __call__(self, folder: Path, *overrides: str, leave_out: str = "nothing") -> subprocess.Popen[str]:
        """``leave_out``: the settings of `TINY` that begin so."""


@pytest.fixture
def start() -> Iterator[Start]:
    """A `Start`."""
    runs: list[subprocess.Popen[str]] = []

    def start_one(folder: Path, *overrides: str, leave_out: str = "nothing") -> subprocess.Popen[str]:
        settings = [setting for setting in TINY if not setting.startswith(leave_out)]
        runs.append(_popen(folder, [*settings, text(folder), *overrides]))
        return runs[-1]

    yield start_one
    for run in runs:
        if run.poll() is None:
            run.kill()
            run.communicate()


def _popen(folder: Path, overrides: list[str]) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "ftopt", "run", "diloco_bytes", *overrides]
    return subprocess.Popen(
        arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def folder_of(folder: Path) -> RunFolder:
    """The one run in ``folder``."""
    (path,) = (folder / "runs").iterdir()
    return RunFolder(path)


def summary_of(folder: Path) -> dict[str, Any]:
    """Its summary."""
    summary: dict[str, Any] = json.loads(folder_of(folder).summary.read_text(encoding="utf-8"))
    return summary


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Its events of one name."""
    return [event for event in read(folder_of(folder).events) if event["event"] == name]


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for a condition; AssertionError when it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
