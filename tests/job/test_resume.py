"""Runs that go on from a checkpoint when every process of the job has died."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from ftopt.checkpoint.reader import verified, whole
from ftopt.cli.main import main
from ftopt.telemetry.folder import RunFolder
from ftopt.telemetry.jsonl import read
from tests.job.running import Run, Start, alive, events_of, summary_of, until

SEED = 5
_PATIENCE_S = 200.0
"""A run of several processes on a machine that is busy otherwise."""


def kill_all(run: Run, folder: RunFolder) -> None:
    """kill -9 of the runner, the coordinator and all replicas."""
    run.signal(signal.SIGSTOP)  # so that it starts nothing more
    pids = [event["data"]["pid"] for event in read(folder.events) if event["event"] == "spawn"]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    run.signal(signal.SIGKILL)
    until(lambda: not any(map(alive, pids)))


def runs(folder: Path) -> set[Path]:
    return set((folder / "runs").iterdir()) if (folder / "runs").exists() else set()


def after_a_checkpoint(folder: Path, known: set[Path], lines: int) -> RunFolder:
    """Waits for the run that is not among the ``known``, its first checkpoint, and so many events more."""
    until(lambda: bool(runs(folder) - known), _PATIENCE_S)
    (path,) = runs(folder) - known
    here = RunFolder(path)
    until(lambda: here.events.exists() and _told(here, "checkpoint") > 0, _PATIENCE_S)
    enough = len(read(here.events)) + lines
    until(lambda: len(read(here.events)) >= enough, _PATIENCE_S)
    return here


def newest_run(folder: Path) -> RunFolder:
    return RunFolder(max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns))


def _told(folder: RunFolder, name: str) -> int:
    return sum(event["event"] == name for event in read(folder.events))


def every_step_once(summary: dict[str, object]) -> None:
    assert summary["survivor_inner_steps_lost"] == summary["inner_steps_counted_twice"] == 0
    digests = summary["anchor_digests"]
    assert isinstance(digests, dict) and len(set(digests.values())) == 1


def killed_and_resumed(folder: Path, start: Start, moments: int, replicas: list[int]) -> None:
    """Kills everything at random moments of a job, goes on with as many replicas as the list says, and ends it."""
    chance, store = random.Random(SEED), folder / "store"
    settings = [f"checkpoint.dir={store}", "checkpoint.every=1", "method.sync_every=5"]
    newest = -1
    for moment in range(moments):
        resume = [f"checkpoint.resume={store}"] if whole(store) else []
        more = [*settings, *resume, "train.inner_steps=1000000", f"replicas={replicas[moment % len(replicas)]}"]
        known = runs(folder)
        run = start(folder, *more, leave_out="replicas")
        kill_all(run, after_a_checkpoint(folder, known, chance.randint(0, 60)))
        found = verified(store)  # none is unreadable
        assert found.manifest.version > newest, "the job did not get on"
        newest = found.manifest.version
    goal = verified(store).manifest.inner_step + 20
    last = [*settings, f"checkpoint.resume={store}", f"train.inner_steps={goal}", f"replicas={replicas[-1]}"]
    status, error = start(folder, *last, leave_out="replicas").wait(_PATIENCE_S)
    assert status == 0, error
    here = newest_run(folder)
    summary = json.loads(here.summary.read_text())
    every_step_once(summary)
    assert summary["outer_steps"] and verified(store).manifest.inner_step >= goal
    first = read(min((folder / "runs").iterdir(), key=lambda path: path.name) / "replicas" / "r0.jsonl")
    then = read(here.steps("r0"))
    assert then[0]["inner_step"] > first[0]["inner_step"] and then[0]["loss"] < first[0]["loss"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_9_of_everything_and_on_with_another_number_of_replicas(tmp_path: Path, start: Start) -> None:
    killed_and_resumed(tmp_path, start, 1, [3, 2])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_9_of_everything_at_fifty_moments(tmp_path: Path, start: Start) -> None:
    """Half of the resumes with another number of replicas."""
    killed_and_resumed(tmp_path, start, 50, [3, 3, 2, 2, 4, 4])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_when_all_replicas_have_died_the_run_says_how_to_go_on(tmp_path: Path, start: Start) -> None:
    kills = ",".join(f"{{replica: {i}, at_step: {45 + 2 * i}, point: inner, do: kill}}" for i in range(2))
    short = ("method.sync_every=10", "checkpoint.every=2", "train.inner_steps=100")
    status, error = start(tmp_path, *short, "replicas=2", f"faults=[{kills}]", leave_out="replicas").wait(_PATIENCE_S)
    assert status == 1
    assert "all replicas died before the end" in error
    path = error.strip().rpartition("checkpoint.resume=")[2]
    began = verified(Path(path)).manifest.inner_step
    assert began in (20, 40)  # the last one may have been under way
    first = newest_run(tmp_path).path.rename(tmp_path / "first")
    path = path.replace(str(tmp_path / "runs" / first.name), str(first))
    there = whole(first / "checkpoint")[-1]
    status, error = start(tmp_path, *short, f"checkpoint.resume={there}", leave_out="method").wait(_PATIENCE_S)
    assert status == 0, error
    summary = summary_of(tmp_path)
    every_step_once(summary)
    assert summary["inner_steps_committed"] == 3 * (100 - began)
    assert [event["data"]["pending_by_fragment"] for event in events_of(tmp_path, "resumed")] == [[0]] * 3


def test_a_damaged_checkpoint_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.checkpoint.parts import part, writer

    monkeypatch.chdir(tmp_path)
    one, _ = writer(tmp_path / "c")
    for version in (5, 10):
        one.write(part(version=version))
    before, damaged = whole(tmp_path / "c")
    (damaged / "replica-r0.safetensors").write_bytes(b"")
    assert main(["run", "diloco_bytes", f"checkpoint.resume={tmp_path / 'c'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ftopt: {damaged / 'replica-r0.safetensors'}: has 0 bytes; ")
    assert error.endswith(f"; the one before it is sound: use {before}\n")
    assert not (tmp_path / "runs").exists()
