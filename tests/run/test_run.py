"""``ftopt run`` with real processes: to the end, through deaths, and stopped from outside."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ftopt.checkpoint.reader import find, whole
from ftopt.cli.main import main
from ftopt.config.loader import load
from ftopt.run.processes import Child
from ftopt.run.runner import Runner
from ftopt.watch.folder import RunFolder
from ftopt.watch.report.write import write
from ftopt.watch.terminal import Display
from tests.run.running import CALM, Start, alive, events_of, folder_of, summary_of, until

_NO_DATA = "data.path=nowhere/*.txt"


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_replica_comes_back_and_no_survivor_loses_a_step(tmp_path: Path, start: Start, fresh: bool) -> None:
    """With ``min_replicas=3`` the job's end waits for the one that comes back, however slow this machine is."""
    fault = "{replica: 1, at_step: 100, point: reduce, do: kill, rejoin_s: 1}"
    settings = (*CALM, "policy.min_replicas=3", "train.inner_steps=200", f"faults=[{fault}]")
    status, error = start(tmp_path, *settings, fresh=fresh).wait()
    assert status == 0, error
    got = summary_of(tmp_path)
    assert got["survivor_inner_steps_lost"] == 0
    assert got["inner_steps_counted_twice"] == 0
    assert got["dead_inner_steps_lost"] == 20
    assert got["attempts_aborted"] == 1
    assert got["chain_conflicts"] == []
    assert len(got["joins"]) == 4
    assert [(death["replica"], death["status"]) for death in got["deaths"]] == [("r1", "SIGKILL")]
    assert len(set(got["anchor_digests"].values())) == 1
    assert set(got["anchor_digests"]) == {"r0", "r1", "r2"}
    assert got["val_loss_final"] < got["val_loss_initial"]
    shown = (tmp_path / "stdout.txt").read_text()
    assert "live page: http://127.0.0.1:" in shown and "outer optimizer: sgd, lr=1, momentum=0.25" in shown
    decisions = [event["data"]["members"] for event in events_of(tmp_path, "decide")]
    back = next(i for i, members in enumerate(decisions) if ["r1", 2] in [member[:2] for member in members])
    kept = [member[2] for member in decisions[back] if member[0] != "r1"]
    assert kept == [20, 20], "the survivors' contributions of the aborted attempt"
    later = [member for members in decisions[back:] for member in members]
    assert max(member[2] for member in later if member[0] != "r1") > 20, "they trained on alone"
    assert any(member[:2] == ["r1", 2] and member[2] > 0 for member in later), "the successor contributed"


@pytest.mark.slow
def test_a_killed_coordinator_comes_back_with_its_journal_and_nothing_is_lost(tmp_path: Path, start: Start) -> None:
    fault = "{replica: coordinator, at_step: 100, point: decide, do: kill, rejoin_s: 0}"
    status, error = start(tmp_path, "replicas=2", "train.inner_steps=300", f"faults=[{fault}]").wait()
    assert status == 0, error
    got = summary_of(tmp_path)
    assert got["survivor_inner_steps_lost"] == 0
    assert got["chain_conflicts"] == []
    assert got["deaths"] == []
    assert len(got["joins"]) == 2
    assert len(set(got["anchor_digests"].values())) == 1
    spawns = [event["data"]["life"] for event in events_of(tmp_path, "spawn") if event["replica"] == "coordinator"]
    assert spawns == [1, 2]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_saves_its_last_version_and_shows_how_to_resume(
    tmp_path: Path, start: Start, number: int, status: int
) -> None:
    run = start(tmp_path, "replicas=2", "train.inner_steps=100000", "checkpoint.every=1000000", *CALM)
    until(lambda: any(tmp_path.glob("runs/*")) and len(events_of(tmp_path, "decide")) > 2)
    run.signal(number)
    ended, error = run.wait()
    assert ended == status, error
    got = summary_of(tmp_path)
    assert error == f"ftopt: interrupted at inner step {got['inner_step']} of 100000\n"
    assert got["deaths"] == []
    assert got["survivor_inner_steps_lost"] == got["inner_steps_pending"] == 0
    assert len(events_of(tmp_path, "end")) == 2
    (checkpoint,) = whole(folder_of(tmp_path).checkpoints)
    assert find(checkpoint).manifest.inner_step == got["inner_step"]
    said = (tmp_path / "stdout.txt").read_text()
    assert f"all {got['inner_steps_executed']:,} inner steps are in the model" in said
    command = shlex.split(said.splitlines()[-1].partition("to resume: ")[2])
    assert command == ["ftopt", "resume", str(folder_of(tmp_path).path.relative_to(tmp_path))]
    story = " ".join(write([folder_of(tmp_path).path], say=lambda text: None).story)
    by, at = ("Ctrl-C" if number == signal.SIGINT else "SIGTERM"), got["inner_step"]
    assert f"It was interrupted by {by} at inner step {at:,} of 100,000: r0 and r1 left." in story
    assert "is lost" not in said  # the last one to leave takes nothing along
    assert not any(alive(event["data"]["pid"]) for event in events_of(tmp_path, "spawn"))


def test_a_run_that_goes_on_is_not_resumed(tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, "replicas=1", "train.inner_steps=100000", "checkpoint.every=1")
    until(lambda: any(tmp_path.glob("runs/*")) and len(events_of(tmp_path, "checkpoint")) > 0)
    folder = folder_of(tmp_path).path
    assert main(["resume", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"ftopt: {folder} still goes on, and its checkpoints come and go; end it")
    assert list((tmp_path / "runs").iterdir()) == [folder]


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path, start: Start) -> None:
    run = start(tmp_path, "replicas=2", "train.inner_steps=100000")
    until(lambda: any(tmp_path.glob("runs/*")) and len(events_of(tmp_path, "decide")) > 0)
    for event in events_of(tmp_path, "spawn"):
        if event["replica"] != "coordinator":
            os.kill(event["data"]["pid"], signal.SIGSTOP)  # which does not leave by itself
    run.signal(signal.SIGINT)
    until(lambda: "another Ctrl-C ends them at once" in (tmp_path / "stdout.txt").read_text())
    run.signal(signal.SIGINT)
    status, error = run.wait()
    assert (status, error) == (130, "ftopt: interrupted twice: the processes were ended at once\n")
    got = summary_of(tmp_path)
    left = len(events_of(tmp_path, "end"))  # a fast one has left before the second signal
    assert len(got["killed_at_the_end"]) + left == 2 and got["survivor_inner_steps_lost"] == 0
    assert got["deaths"] == [] and " died" not in (tmp_path / "stdout.txt").read_text()
    assert events_of(tmp_path, "interrupted")[-1]["data"]["again"] == "Ctrl-C"
    assert not any(alive(event["data"]["pid"]) for event in events_of(tmp_path, "spawn"))


def test_a_run_whose_replicas_are_told_to_leave_has_not_come_to_its_end(tmp_path: Path, start: Start) -> None:
    run = start(tmp_path, "replicas=2", "train.inner_steps=100000", *CALM)
    until(lambda: any(tmp_path.glob("runs/*")) and len(events_of(tmp_path, "decide")) > 0)
    for event in events_of(tmp_path, "spawn"):
        if event["replica"] != "coordinator":
            os.kill(event["data"]["pid"], signal.SIGTERM)
    status, error = run.wait()
    got = summary_of(tmp_path)
    assert (status, error) == (1, f"ftopt: all replicas have left at inner step {got['inner_step']} of 100000\n")
    assert got["survivor_inner_steps_lost"] == got["inner_steps_pending"] == 0


@pytest.mark.long  # replicas wait for a job that cannot go on
def test_a_run_whose_folder_is_removed_ends_and_says_so(tmp_path: Path, start: Start) -> None:
    run = start(tmp_path, "replicas=2", "train.inner_steps=100000")
    until(lambda: any(tmp_path.glob("runs/*")) and len(events_of(tmp_path, "decide")) > 0)
    folder, pids = folder_of(tmp_path).path, [event["data"]["pid"] for event in events_of(tmp_path, "spawn")]
    shutil.rmtree(folder, ignore_errors=True)  # a checkpoint may be written meanwhile
    status, error = run.wait()
    assert (status, error) == (1, f"ftopt: {folder} was removed during the run, which was ended: it wrote there\n")
    assert "are in the model" not in (tmp_path / "stdout.txt").read_text()
    assert not any(map(alive, pids))


@pytest.mark.long
def test_no_process_outlives_a_killed_runner(tmp_path: Path, start: Start) -> None:
    run = start(tmp_path, "replicas=1", "train.inner_steps=100000", fresh=True)
    until(lambda: any(tmp_path.glob("runs/*")) and len(events_of(tmp_path, "decide")) > 0)
    pids = [event["data"]["pid"] for event in events_of(tmp_path, "spawn")]
    assert len(pids) == 2
    run.signal(signal.SIGKILL)
    run.wait()
    until(lambda: not any(map(alive, pids)))


def test_what_is_wrong_with_a_plain_recipe_is_said_before_anything_is_written(tmp_path: Path, start: Start) -> None:
    status, error = start(tmp_path, _NO_DATA).wait()
    assert status == 2
    assert "no file" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model.factory=no_such_module:build"], "no_such_module"),
        (
            ["model={factory: 'torch.nn:Embedding', args: {num_embeddings: 256, embedding_dim: 256}}", _NO_DATA],
            "no file",
        ),
    ],
)
def test_what_a_replica_finds_wrong_is_the_runs_message(
    tmp_path: Path, start: Start, overrides: list[str], part: str
) -> None:
    status, error = start(tmp_path, "replicas=1", *overrides, leave_out="model.").wait()
    assert status == 2
    assert part in error
    assert "Traceback" not in error
    assert folder_of(tmp_path).summary.exists()


@pytest.mark.slow
def test_a_run_whose_replicas_all_die_fails(tmp_path: Path, start: Start) -> None:
    fault = "{at_step: 30, do: kill}"
    status, error = start(tmp_path, "replicas=1", "train.inner_steps=100", f"faults=[{fault}]").wait()
    assert status == 1
    assert "all replicas died" in error
    assert summary_of(tmp_path)["dead_inner_steps_lost"] == 9


@pytest.mark.parametrize("evaluates", [True, False])
def test_what_replicas_do_behind_the_last_step_is_said_while_one_does_it(tmp_path: Path, evaluates: bool) -> None:
    """Not when all are at their end: then they leave, which the coordinator has told."""
    said: list[str] = []
    display = SimpleNamespace(note=lambda note: said.append(note.text))
    runner = Runner(load("digits", []), RunFolder(tmp_path / "run"), cast(Display, display))
    runner._stages._clock = iter(range(0, 100, 2)).__next__
    child = SimpleNamespace(name="r0", finish_up=lambda: None)
    runner._children["r0"], runner._first_end = cast(Child, child), time.monotonic()
    runner._ended |= set() if evaluates else {"r0"}
    for _ in range(2):
        runner._end_when_done()
    assert [text.startswith("the last step is done") for text in said] == [evaluates]


def test_a_full_disk_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    display = SimpleNamespace(note=lambda note: said.append(note.text))
    runner = Runner(load("digits", []), RunFolder(tmp_path / "run"), cast(Display, display))
    free = iter([1, 0, 0])
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=next(free)))
    for _ in range(3):
        runner._look_at_disk()
    (text,) = said
    assert f"{tmp_path}/run: no space is left on its disk; make room" in text
