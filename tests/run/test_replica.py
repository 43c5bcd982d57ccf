"""``ftopt replica`` without ``ftopt run``: what it shows, what it leaves behind, and how it is started again."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ftopt.checkpoint.reader import find, whole
from ftopt.cli.main import main
from ftopt.cli.replica import _tell
from ftopt.config.loader import load
from ftopt.config.schema import CheckpointConfig
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.run.own_folder import OwnFolder
from ftopt.run.replica_process import Result
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines
from tests.checkpoint import parts
from tests.forkserver import CONTEXT
from tests.run.running import CALM, TINY, text, until


class Process:
    """``ftopt WORDS`` in ``folder``, from the fork server; its output is in ``<name>.txt``."""

    def __init__(self, folder: Path, name: str, words: Sequence[str]) -> None:
        self.output = folder / f"{name}.txt"
        self.process = CONTEXT.Process(target=_run, args=(folder, self.output, list(words)))
        self.process.start()

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> int | None:
        self.process.join(200.0)
        return self.process.exitcode

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _run(folder: Path, output: Path, words: Sequence[str]) -> None:
    os.setsid()
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["ftopt", *words]
    sys.exit(main(list(words)))


Start = Callable[[str, Sequence[str]], Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Process] = []

    def start_one(name: str, words: Sequence[str]) -> Process:
        started.append(Process(tmp_path, name, words))
        return started[-1]

    yield start_one
    for process in reversed(started):
        process.end()


def coordinator(start: Start, name: str = "coordinator") -> str:
    process = start(name, ["coordinator", "--new", "--bind", "127.0.0.1:0"])
    until(lambda: "\n" in process.said())
    found = re.search(r"coordinator at (http://127\.0\.0\.1:\d+)", process.said())
    assert found is not None, process.said()
    return found[1]


def replica(folder: Path, url: str, id_: str, *overrides: str, replicas: int = 1) -> list[str]:
    settings = [setting for setting in TINY if not setting.startswith("replicas")]
    where = ["--coordinator", url, "--id", id_, f"replicas={replicas}"]
    return ["replica", "diloco_bytes", *where, *settings, *CALM, text(folder), *overrides]


def summary_of(files: RunFolder) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(files.summary.read_text(encoding="utf-8"))
    return summary


@pytest.mark.long
def test_to_the_end_it_shows_its_progress_and_leaves_what_a_run_leaves(tmp_path: Path, start: Start) -> None:
    url = coordinator(start)
    both = [start(id_, replica(tmp_path, url, id_, "train.inner_steps=60", replicas=2)) for id_ in ("r0", "r1")]
    assert [process.wait() for process in both] == [0, 0]
    for id_, process in zip(("r0", "r1"), both, strict=True):
        files = RunFolder(tmp_path / "runs" / f"diloco_bytes-{id_}")
        assert load(str(files.recipe), []).train.inner_steps == 60
        summary, said = summary_of(files), process.said()
        taken = len(read_lines(files.steps(id_)))
        assert taken == summary["inner_steps_executed"] == summary["inner_steps_committed"] > 0
        assert summary["inner_step"] >= 60 and summary["outer_steps"] == 3
        assert summary["survivor_inner_steps_lost"] is None  # only the coordinator's decisions could tell
        (checkpoint,) = whole(files.checkpoints)
        assert find(checkpoint).manifest.inner_step >= 60
        for line in (
            "all 2 replicas are connected",
            f"replica {id_} trains from version 0, inner step 0 on",
            f"all {taken} inner steps of this replica are in the model",
            f"checkpoint: runs/diloco_bytes-{id_}/checkpoint/{checkpoint.name}",
        ):
            assert line in said
        assert main(["export", str(checkpoint), str(tmp_path / f"{id_}.safetensors")]) == 0
    weights = [(tmp_path / f"{id_}.safetensors").read_bytes() for id_ in ("r0", "r1")]
    assert weights[0] == weights[1]
    told = tmp_path / "coordinator.txt"
    until(lambda: "job diloco_bytes: r1 left" in told.read_text())
    assert "job diloco_bytes: r0 joined; the job is at inner step 0" in told.read_text()


@pytest.mark.slow
def test_a_job_that_has_failed_leaves_its_accounting_and_the_command_that_resumes_it(
    tmp_path: Path, start: Start
) -> None:
    url = coordinator(start)
    strict = ("train.inner_steps=1000000", "policy.on_loss=fail", "policy.dead_after_s=3")
    both = [start(id_, replica(tmp_path, url, id_, *strict, replicas=2)) for id_ in ("r0", "r1")]
    files = RunFolder(tmp_path / "runs" / "diloco_bytes-r0")
    until(lambda: len(read_lines(files.steps("r0"))) > 50)
    both[1].signal(signal.SIGKILL)
    assert both[0].wait() == 1
    summary, (checkpoint,), said = summary_of(files), whole(files.checkpoints), both[0].said()
    assert find(checkpoint).manifest.inner_step == summary["inner_step"]
    assert f"{summary['inner_steps_executed']:,} inner steps of this replica" in said
    assert "to resume the job, if no other one has a newer checkpoint: ftopt replica diloco_bytes" in said
    assert "to take part again" not in said and "Traceback" not in said
    assert "ftopt: job 'diloco_bytes' has failed, since replica r1 was lost (policy.on_loss=fail)" in said


@pytest.mark.long
def test_ctrl_c_saves_the_model_and_the_command_that_is_shown_resumes_the_job(tmp_path: Path, start: Start) -> None:
    url = coordinator(start)
    process = start("first", replica(tmp_path, url, "r0", "train.inner_steps=1000000"))
    files = RunFolder(tmp_path / "runs" / "diloco_bytes-r0")
    until(lambda: len(read_lines(files.steps("r0"))) > 50)
    process.signal(signal.SIGINT)
    assert process.wait() == 0
    summary, (checkpoint,) = summary_of(files), whole(files.checkpoints)
    assert summary["inner_steps_pending"] == 0
    assert find(checkpoint).manifest.inner_step == summary["inner_step"] == summary["inner_steps_committed"]
    assert "replica r0 leaves (SIGINT); it hands in its pending steps" in process.said()
    assert "to take part again while the job runs: ftopt replica diloco_bytes" in process.said()
    command = process.said().split("if no other one has a newer checkpoint: ")[1].splitlines()[0]
    words = [word for word in shlex.split(command)[1:] if not word.startswith("train.inner_steps")]
    other = coordinator(start, "other")  # which has never heard of the job
    words[words.index("--coordinator") + 1] = other
    again = start("again", [*words, f"train.inner_steps={summary['inner_step'] + 20}"])
    assert again.wait() == 0, again.said()
    new = RunFolder(tmp_path / "runs" / "diloco_bytes-r0-2")  # another coordinator: another job
    assert min(line["inner_step"] for line in read_lines(new.steps("r0"))) == summary["inner_step"] + 1
    assert summary_of(new)["inner_steps_committed"] == 20


def test_a_replica_whose_folder_is_removed_shows_no_figures_and_saves_its_model(tmp_path: Path, start: Start) -> None:
    url = coordinator(start)
    process = start("first", replica(tmp_path, url, "r0", "train.inner_steps=1000000"))
    files = RunFolder(tmp_path / "runs" / "diloco_bytes-r0")
    until(lambda: len(read_lines(files.steps("r0"))) > 50)
    shutil.rmtree(files.path)
    process.signal(signal.SIGINT)
    assert process.wait() == 0
    assert "no figures: events.jsonl is not there" in process.said() and "executed" not in process.said()
    (checkpoint,) = whole(files.checkpoints)
    assert f"checkpoint: runs/diloco_bytes-r0/checkpoint/{checkpoint.name}" in process.said()


def test_a_second_life_continues_the_folder_and_both_are_accounted_for(tmp_path: Path, start: Start) -> None:
    url = coordinator(start)
    words = replica(tmp_path, url, "r1", "train.inner_steps=1000000", replicas=2)
    other = start("r0", replica(tmp_path, url, "r0", "train.inner_steps=1000000", replicas=2))
    process, files = start("r1", words), RunFolder(tmp_path / "runs" / "diloco_bytes-r1")
    until(lambda: len(read_lines(files.steps("r1"))) > 50)
    process.signal(signal.SIGKILL)
    process.wait()
    first = len(read_lines(files.steps("r1")))
    again = start("r1-again", words)
    until(lambda: len(read_lines(files.steps("r1"))) > first + 30)
    again.signal(signal.SIGTERM)
    assert again.wait() == 0, again.said()
    assert other.process.is_alive()
    told = again.said()
    assert "replica r1 is back as incarnation 2: it trains from the job's version " in told
    before = "replica r1 builds the model and opens the data, then joins the job", "replica r1 joins the job"
    assert all(line in told for line in before), "what it does until then takes a while"
    assert [path.name for path in (tmp_path / "runs").glob("*r1*")] == ["diloco_bytes-r1"]
    lives = [line["incarnation"] for line in read_lines(files.steps("r1"))]
    assert lives.count(1) == first and lives.count(2) > 30 and lives == sorted(lives)
    times = [line["t_s"] for line in read_lines(files.steps("r1"))]
    assert times == sorted(times)
    summary = summary_of(files)
    assert [(death["incarnation"], death["status"]) for death in summary["deaths"]] == [(1, "unknown")]
    kept, lost = summary["inner_steps_committed"], summary["dead_inner_steps_lost"]
    assert kept + lost + summary["inner_steps_pending"] == summary["inner_steps_executed"] == len(lives)
    assert 0 <= lost < 100


def begun(path: Path, job: str, lives: Sequence[int], *, steps: int = 1) -> OwnFolder:
    """A folder of these incarnations."""
    opened: list[tuple[RunFolder, float]] = []
    own = OwnFolder(load("diloco_bytes", []), "r0", job, path, lambda files, started: opened.append((files, started)))
    own(Event("hold", "r0", data={"text": "waits"}))
    assert not own.is_open and not opened
    for life in lives:
        own(Event("apply", "r0", life, 0, 1, data={"counted_step": steps, "committed_step": steps}))
    assert own.is_open and len(opened) == 1
    return own


def test_a_model_that_could_not_be_saved_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _tell(argparse.Namespace(recipe="digits"), Result(True, RunFolder(tmp_path)), "r0", CheckpointConfig())
    assert "this replica has saved no checkpoint" in capsys.readouterr().out
    saving = CheckpointConfig(dir=str(tmp_path / "shared"))
    _tell(argparse.Namespace(recipe="digits"), Result(True, RunFolder(tmp_path)), "r0", saving)
    assert f"there is no complete checkpoint in {tmp_path}/shared (checkpoint.dir) yet" in capsys.readouterr().out


def test_the_way_on_goes_by_the_newest_checkpoint_in_the_folder_that_all_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own folder has one of a former life, which saved for itself."""
    files, shared = RunFolder(tmp_path / "runs" / "houses-r0"), tmp_path / "shared"
    parts.writer(files.checkpoints)[0].write(parts.part(version=20))
    for version in (28, 30):
        parts.writer(shared)[0].write(parts.part(version=version))
    overrides = [f"checkpoint.dir={shared}", "checkpoint.every=2"]
    given = argparse.Namespace(recipe="mine.yaml", overrides=overrides, coordinator="http://head:29410")
    _tell(given, Result(False, files), "r0", CheckpointConfig(dir=str(shared), every=2))
    newest, said = whole(shared)[-1], capsys.readouterr().out
    assert newest.name.startswith("v00000030-") and f"checkpoint: {newest}\n" in said
    assert f"to get the model from it: ftopt export {newest} model.safetensors" in said
    assert f"to resume the job when all replicas have left, if there is no newer one in {shared}: ftopt replica" in said
    assert f" checkpoint.dir={shared} checkpoint.every=2 checkpoint.resume={newest}\n" in said
    assert "v00000020" not in said


@pytest.mark.parametrize("steps_on", [0, 25])
def test_a_checkpoint_that_is_older_than_what_the_replica_leaves_says_of_which_version_it_is(
    steps_on: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have made a newer version while it was saved."""
    monkeypatch.setattr("ftopt.cli.replica.closing_lines", lambda summary: [])
    files = RunFolder(tmp_path / "houses-r0")
    parts.writer(files.checkpoints)[0].write(parts.part(version=3))
    at = whole(files.checkpoints)[0]
    inner_step = find(at).manifest.inner_step
    result = Result(True, files, {"inner_step": inner_step + steps_on})
    _tell(argparse.Namespace(recipe="mine.yaml"), result, "r0", CheckpointConfig())
    said = f"checkpoint: {at}\nit is of version 3, inner step {inner_step}, and the job was further on\n"
    assert (said in capsys.readouterr().out) is bool(steps_on)


def test_the_command_to_go_on_has_what_the_environment_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTOPT_COORDINATOR", "http://there:29410")
    monkeypatch.setenv("FTOPT_JOB", "fourth")
    result = Result(False, RunFolder(tmp_path / "houses-r0"), None)
    _tell(argparse.Namespace(recipe="mine.yaml", overrides=["replicas=2"], job=None), result, "r0", CheckpointConfig())
    command = "ftopt replica mine.yaml --coordinator http://there:29410 --job fourth --id r0 replicas=2"
    assert f"to take part again while the job runs: {command}\n" in capsys.readouterr().out


def test_checkpoints_of_another_job_are_no_fallback(tmp_path: Path) -> None:
    recipe, path = load("diloco_bytes", []), tmp_path / "x"
    first = OwnFolder(recipe, "r0", "http://a one", path, lambda files, started: None)
    first(Event("apply", "r0", 1, 0, 1, data={"counted_step": 1, "committed_step": 1}))
    folders = [
        OwnFolder(recipe, "r0", job, path, lambda files, started: None).files.path.name
        for job in ("http://a one", "http://b one", "http://a two")
    ]
    assert folders == ["x", "x", "x-2"]


def test_two_that_are_given_one_folder_at_once_do_not_share_it(tmp_path: Path) -> None:
    recipe, path = load("diloco_bytes", []), tmp_path / "x"
    path.mkdir()  # a volume, say
    both = [OwnFolder(recipe, id_, "http://a job", path, lambda files, started: None) for id_ in ("r0", "r1")]
    for own, id_ in zip(both, ("r0", "r1"), strict=True):
        own(Event("apply", id_, 1, 0, 1, data={"counted_step": 1, "committed_step": 1}))
    assert [own.files.path.name for own in both] == ["x", "x-2"]
    assert {line["replica"] for line in read_lines(both[0].files.events)} == {"r0"}


def test_another_job_gets_another_folder_and_the_same_one_is_continued(tmp_path: Path) -> None:
    base = tmp_path / "x-r0"
    assert begun(base, "http://a job", [1]).files.path == base
    assert begun(base, "http://a job", [2]).files.path == base
    assert begun(base, "http://a job", [2]).files.path.name == "x-r0-2"  # it begins again: not the one before
    assert begun(base, "http://a job", [3]).files.path.name == "x-r0-2"
    assert begun(base, "http://b job", [4]).files.path.name == "x-r0-3"
    assert [line["event"] for line in read_lines(base / "events.jsonl")] == [
        "spawn", "hold", "apply", "death", "spawn", "hold", "apply",
    ]  # fmt: skip


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for path, said in ((file / "x", "Not a directory"), (tmp_path / ("x" * 300), "File name too long")):
        with pytest.raises(UserError, match=said):
            OwnFolder(load("diloco_bytes", []), "r0", "http://a job", path, lambda files, started: None)


@pytest.mark.long
def test_what_has_never_joined_leaves_no_folder(tmp_path: Path, start: Start) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        process = start("r0", replica(tmp_path, f"http://127.0.0.1:{nobody.getsockname()[1]}", "r0"))
        assert process.wait() == 2
    assert "no coordinator answers" in process.said()
    assert not list((tmp_path / "runs").iterdir())
