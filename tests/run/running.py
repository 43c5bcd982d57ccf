"""Real runs of a tiny model for tests: the command line in processes of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from ftopt.cli.main import main
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines
from tests.forkserver import CONTEXT
from tests.run.forked import use_forks

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

CALM = ("policy.grace_s=60", "policy.dead_after_s=20", "policy.stragglers=wait")
"""Nobody is called in and nobody is lost, however busy the machine is. A process that dies is missed at once."""


def text(folder: Path) -> str:
    """A text to train on; its override."""
    path = folder / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    return f"data.path={path}"


class Run:
    """A running ``ftopt run RECIPE``: a process from the fork server, which has torch loaded, in a session of its
    own. The coordinator and the replicas that it starts are forks of it, or ``fresh`` processes like any user's.
    """

    def __init__(
        self, folder: Path, overrides: Sequence[str], *, fresh: bool = False, recipe: str = "diloco_bytes"
    ) -> None:
        self._files = [folder / "stdout.txt", folder / "stderr.txt"]
        self._process = CONTEXT.Process(target=_run, args=(folder, self._files, [recipe, *overrides], fresh))
        self._process.start()

    def wait(self, timeout_s: float = 200.0) -> tuple[int, str]:
        """Waits for its end; exit status, and what it said on standard error."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, "the run did not end"
        return self._process.exitcode, self._files[1].read_text(encoding="utf-8")

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kills it if it still runs; its processes end by themselves."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


def _run(folder: Path, files: Sequence[Path], words: Sequence[str], fresh: bool) -> None:
    os.setsid()
    os.chdir(folder)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if not fresh:
        use_forks()
    sys.exit(main(["run", *words]))


class Start(Protocol):
    """Starts a `Run` in a folder, with `TINY` and then ``overrides``; ended with the test."""

    def __call__(self, folder: Path, *overrides: str, leave_out: str = "nothing", fresh: bool = False) -> Run:
        """``leave_out``: the settings of `TINY` that begin so. ``fresh``: of `Run`."""


@pytest.fixture
def start() -> Iterator[Start]:
    """A `Start`."""
    runs: list[Run] = []

    def start_one(folder: Path, *overrides: str, leave_out: str = "nothing", fresh: bool = False) -> Run:
        settings = [setting for setting in TINY if not setting.startswith(leave_out)]
        runs.append(Run(folder, [*settings, text(folder), *overrides], fresh=fresh))
        return runs[-1]

    yield start_one
    for run in runs:
        run.end()


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
    return [event for event in read_lines(folder_of(folder).events) if event["event"] == name]


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
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
