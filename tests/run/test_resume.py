"""Runs that go on from a checkpoint when every process of the job has died."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftopt.checkpoint.reader import Checkpoint, verified, whole
from ftopt.cli.main import main
from ftopt.cli.resume import checkpoints_of
from ftopt.cli.run import resuming
from ftopt.sync.protocol.intervals import union
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines
from tests.checkpoint import parts
from tests.run.recount import NEAR, loss_around, losses, that_stand, times
from tests.run.running import CALM, Run, Start, alive, events_of, summary_of, until

SEED = 5
_PATIENCE_S = 200.0
"""A run of several processes on a machine that is busy otherwise."""


def kill_all(run: Run, folder: RunFolder) -> None:
    """kill -9 of the runner, the coordinator and all replicas."""
    run.signal(signal.SIGSTOP)  # so that it starts nothing more
    pids = [event["data"]["pid"] for event in read_lines(folder.events) if event["event"] == "spawn"]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    run.signal(signal.SIGKILL)
    until(lambda: not any(map(alive, pids)))


def runs(folder: Path) -> set[Path]:
    return set((folder / "runs").iterdir()) if (folder / "runs").exists() else set()


def at_a_moment(folder: Path, known: set[Path], chance: random.Random) -> RunFolder:
    """Waits for the run that is not among the ``known``, and for a moment of it: so many events after its first
    checkpoint; of every fourth run, so many after its first process was started."""
    until(lambda: bool(runs(folder) - known), _PATIENCE_S)
    (path,) = runs(folder) - known
    here, enough = RunFolder(path), chance.randint(3, 40)
    until(here.events.exists, _PATIENCE_S)
    if chance.random() < 0.75:
        until(lambda: _told(here, "checkpoint") > 0, _PATIENCE_S)
        enough = len(read_lines(here.events)) + chance.randint(0, 60)
    until(lambda: len(read_lines(here.events)) >= enough, _PATIENCE_S)
    return here


def newest_run(folder: Path) -> RunFolder:
    return RunFolder(max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns))


def _told(folder: RunFolder, name: str) -> int:
    return sum(event["event"] == name for event in read_lines(folder.events))


def every_step_once(summary: dict[str, object]) -> None:
    assert summary["survivor_inner_steps_lost"] == summary["inner_steps_counted_twice"] == 0
    digests = summary["anchor_digests"]
    assert isinstance(digests, dict) and len(set(digests.values())) == 1


def the_loss_goes_on(before: RunFolder, after: RunFolder, inner_step: int) -> None:
    """It stands no higher than it did, but for noise; at the start it falls by half within `NEAR` steps, not more."""
    if len(losses(after, inner_step, inner_step + NEAR)) < NEAR:
        return  # it did not get so far
    there, here = loss_around(before, after, inner_step)
    assert there / 2 - 0.1 <= here <= there * 1.1 + 0.1, f"loss {there} around inner step {inner_step}, then {here}"


def every_sample_once(runs: list[tuple[RunFolder, int]], last: Checkpoint, summary: dict[str, object]) -> None:
    """Recounted from the lines of all runs: what the last checkpoint calls done, each unit of it once."""
    counted = times(that_stand(runs))
    assert counted and set(counted.values()) == {1}, [unit for unit, count in counted.items() if count > 1]
    assert union((unit, unit + 1) for unit in counted) == union(map(tuple, last.newest[0].record["done"]))
    assert summary["samples_duplicated"] == summary["samples_lost"] == 0


def killed_and_resumed(
    folder: Path, start: Start, moments: int, replicas: list[int], *data: str, workers: Sequence[int] = (0,)
) -> None:
    """Kills everything at random moments of a job, goes on with as many replicas as the list says, and ends it."""
    chance, store = random.Random(SEED), folder / "store"
    settings = [f"checkpoint.dir={store}", "checkpoint.every=1", "method.sync_every=5", "data.sampling=once", *data]
    went: list[tuple[RunFolder, int]] = []  # the runs, each with the version that it went on from
    before, point = None, (0, 0)
    for moment in range(moments):
        resume = [f"checkpoint.resume={store}"] if whole(store) else []
        more = [*settings, *resume, "train.inner_steps=1000000", f"replicas={replicas[moment % len(replicas)]}"]
        more.append(f"data.workers={workers[moment % len(workers)]}")
        known = runs(folder)
        run = start(folder, *more, leave_out="replicas")
        here = at_a_moment(folder, known, chance)
        kill_all(run, here)
        went.append((here, point[0]))
        if before is not None:
            the_loss_goes_on(before, here, point[1])
        found = verified(store).manifest if whole(store) else None  # none is unreadable
        if found is not None and found.version > point[0]:
            before, point = here, (found.version, found.inner_step)
        assert before is here or not _told(here, "checkpoint"), "the job did not get on"
    assert before is not None
    goal = "1000000" if data else str(point[1] + 20)
    last = [*settings, f"checkpoint.resume={store}", f"train.inner_steps={goal}", f"replicas={replicas[-1]}"]
    status, error = start(folder, *last, f"data.workers={workers[-1]}", leave_out="replicas").wait(_PATIENCE_S)
    assert status == 0, error
    here = newest_run(folder)
    the_loss_goes_on(before, here, point[1])
    summary = json.loads(here.summary.read_text())
    every_step_once(summary)
    every_sample_once([*went, (here, point[0])], verified(store), summary)
    assert statistics.median(losses(here, 0, 1_000_000)) < losses(went[0][0], 0, 1)[0] / 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_9_of_everything_and_on_with_other_numbers_of_replicas_and_workers(tmp_path: Path, start: Start) -> None:
    """To the end of the data: each sample of all epochs is in one commit."""
    killed_and_resumed(tmp_path, start, 1, [3, 2], "data.epochs=8", workers=[2, 1])
    done = verified(tmp_path / "store").newest[0].record["done"]
    assert len(done) == 1 and done[0][0] == 0


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
    run = newest_run(tmp_path).path
    assert (tmp_path / "stdout.txt").read_text().endswith(f"to resume: ftopt resume {run.relative_to(tmp_path)}\n")
    first = run.rename(tmp_path / "first")
    there = whole(first / "checkpoint")[-1]
    began = verified(there).manifest.inner_step
    assert began in (20, 40)  # the last one may have been under way
    status, error = start(tmp_path, *short, f"checkpoint.resume={there}", leave_out="method").wait(_PATIENCE_S)
    assert status == 0, error
    told = f"resuming from {there}: version {began // 10}, inner step {began}"
    assert f"{told}\n" in (tmp_path / "stdout.txt").read_text()
    assert resuming(there, began).startswith(f"{told}; train.inner_steps={began} is reached")
    summary = summary_of(tmp_path)
    every_step_once(summary)
    assert summary["inner_steps_committed"] == 3 * (100 - began)
    assert [event["data"]["pending_by_fragment"] for event in events_of(tmp_path, "resumed")] == [[0]] * 3


@pytest.mark.long
def test_fewer_replicas_than_a_checkpoint_has_go_on_from_it(tmp_path: Path, start: Start) -> None:
    store = tmp_path / "store"
    short = ("method.sync_every=10", f"checkpoint.dir={store}", "checkpoint.every=1", *CALM)
    status, error = start(tmp_path, *short, "train.inner_steps=20").wait(_PATIENCE_S)
    assert status == 0, error
    assert verified(store).replicas == ["r0", "r1", "r2"]
    (tmp_path / "runs").rename(tmp_path / "first")
    more = (*short, f"checkpoint.resume={store}", "train.inner_steps=40", "replicas=2")
    status, error = start(tmp_path, *more, leave_out="replicas").wait(_PATIENCE_S)
    assert status == 0, error
    summary = summary_of(tmp_path)
    every_step_once(summary)
    assert (summary["inner_step"], summary["resumed"], summary["joins"], summary["deaths"]) == (40, 2, [], [])
    assert "2 replicas resumed, 0 deaths; " in (tmp_path / "stdout.txt").read_text()
    assert verified(store).replicas == ["r0", "r1"]


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
    assert error.endswith(f"; the previous one is sound: use {before}\n")
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_folder_was_moved_or_copied_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    here, there = tmp_path / "moved", tmp_path / "where" / "it" / "was" / "checkpoint"
    (here / "checkpoint").mkdir(parents=True)
    digits = (Path(__file__).parents[2] / "recipes" / "digits.yaml").read_text(encoding="utf-8")
    (here / "recipe.yaml").write_text(f"{digits}\ncheckpoint: {{dir: {there}}}\n", encoding="utf-8")
    assert checkpoints_of(here) == here
    spawn = {"t_s": 0.0, "event": "spawn", "replica": "r0", "incarnation": 1, "data": {"job": "http://head:29410 x"}}
    foreign = ["{}", '{"event": "spawn", "data": 1}', "[" * 100_000]
    (here / "events.jsonl").write_text("\n".join([*foreign, json.dumps(spawn)]) + "\n")
    parts.writer(here / "checkpoint")[0].write(parts.part(version=20))
    assert checkpoints_of(here) == here
    parts.writer(there)[0].write(parts.part(version=30))
    assert checkpoints_of(here) == there, "of `ftopt replica`: the newest"
    shutil.rmtree(here / "checkpoint")
    assert checkpoints_of(here) == there, "a folder for checkpoints alone, as all machines see it"
