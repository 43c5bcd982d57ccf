"""A coordinator serves several jobs, whose replicas have equal ids, and writes their events into one folder."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import nn

import ftopt
from ftopt.cli.main import main
from ftopt.errors import UserError
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import EventLog, JsonLines, read_lines
from tests.island.running import coordinator
from tests.optimizer.running import together
from tests.run.running import CALM, TINY, text
from tests.sync.server.access import coordinator_thread
from tests.watch.report.recorded import Page, page_of

PATIENT = ftopt.FaultPolicy(start_replicas=2, grace_s=60.0, dead_after_s=20.0, stragglers="wait")


def train(url: str, job: str, replica: str, steps: int, meet: Barrier, *, width: int = 3, stranger: str = "") -> None:
    """A script, which writes no folder. ``meet``: the two begin together. ``stranger``: in the midst of it,
    one of this id and another model comes."""
    model = nn.Linear(width, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    group = ftopt.connect(url, replica, job=job, policy=PATIENT)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=5), group=group)
    with optimizer:
        meet.wait(60.0)
        while optimizer.inner_step < steps:
            if stranger and optimizer.inner_step == 7:
                with pytest.raises(UserError, match="model"):
                    train(url, job, stranger, steps, meet, width=width + 1)
            model(torch.ones(width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def both(url: str, job: str, steps: int, stranger: str = "") -> list[Callable[[], None]]:
    """A job of two replicas."""
    meet = Barrier(2)
    return [partial(train, url, job, "r0", steps, meet, stranger=stranger), partial(train, url, job, "r1", steps, meet)]


def log_in(folder: Path) -> EventLog:
    """What `ftopt coordinator --folder` makes."""
    files = RunFolder(folder)
    files.create()
    return EventLog(JsonLines(files.events, files.began_s()))


def report(folder: Path, *words: str | Path) -> Page:
    page = folder / "page.html"
    assert main(["report", *map(str, words), "--output", str(page)]) == 0
    return page_of(page)


def test_the_report_of_a_coordinators_folder_is_of_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "head"
    with coordinator_thread(token=None, on_event=log_in(folder)) as url:
        together([*both(url, "one", 20), *both(url, "two", 35, stranger="r9")])
    assert {line["job"] for line in read_lines(folder / "events.jsonl")} == {"one", "two"}
    assert main(["report", str(folder)]) == 2
    assert f"{folder} is of 2 jobs: 'one', 'two'; choose one with --job NAME" in capsys.readouterr().err
    assert main(["report", str(folder), "--job", "three"]) == 2
    assert f"--job 'three', but {folder} is of 2 jobs: 'one', 'two'" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.html"))
    for job, least in (("one", 20), ("two", 35)):
        lines = [line for line in read_lines(folder / "events.jsonl") if line["job"] == job]
        decided = [line for line in lines if line["event"] == "decide"]
        inner_step = decided[-1]["inner_step"]
        assert inner_step >= least
        found = report(tmp_path, folder, "--job", job)
        assert f"head, job {job}" in found.text and ", with 2 replicas, and" in found.text
        told = f"committed {len(decided)} outer steps; it came to inner step {inner_step}. No replica died."
        assert told in found.text
        committed = sum(member[2] for line in decided for member in line["data"]["members"])
        assert found.figures()["committed: in the model"] == str(committed)
        assert ("r9 was refused" in found.text) == (job == "two")


def test_a_job_that_was_started_again_under_its_name_is_two_runs(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    log = log_in(folder)
    for steps in (20, 10):  # two coordinators, one after the other; the second one knows nothing
        with coordinator_thread(token=None, on_event=log) as url:
            together(both(url, "one", steps))
    found = report(tmp_path, folder)
    assert "The job was started 2 times under one name" in found.text
    head, *rows = found.tables[0]
    assert head[1:] == ["head, start 1 of 2", "head, start 2 of 2"]
    first, second = map(int, {row[0]: row[1:] for row in rows}["committed inner step"])
    assert first >= 20 and second >= 10


def test_a_line_that_names_no_job_is_of_the_only_one(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    with coordinator_thread(token=None, on_event=log_in(folder)) as url:
        together(both(url, "one", 10))
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace(',"job":"one"', "", 3))
    decided = events.read_text().count('"event":"decide"')  # a third one, if one replica was ahead at the end
    assert decided in (2, 3) and report(tmp_path, folder).figures()["outer steps"] == str(decided)


class Replica:
    """``ftopt replica`` of a job, in a folder that is named like both."""

    def __init__(self, folder: Path, url: str, job: str, replica: str, *overrides: str) -> None:
        self.folder = folder / f"{job}-{replica}"
        where = ["--coordinator", url, "--id", replica, "--job", job, "--folder", str(self.folder)]
        settings = [*TINY, *CALM, text(folder), "replicas=2", *overrides]
        command = [sys.executable, "-m", "ftopt", "replica", "diloco_bytes", *where, *settings]
        with (folder / f"{job}-{replica}.txt").open("a") as out:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_folders_of_replicas_tell_which_job_is_meant(tmp_path: Path) -> None:
    head = tmp_path / "head"
    steps = {"one": 60, "two": 400}
    with coordinator(tmp_path, "--folder", str(head)) as url, ExitStack() as ends:

        def start(job: str, replica: str, *overrides: str) -> Replica:
            started = Replica(tmp_path, url, job, replica, f"train.inner_steps={steps[job]}", *overrides)
            ends.callback(started.end)
            return started

        def decided() -> int:
            lines = read_lines(head / "events.jsonl")
            return sum(line["event"] == "decide" and line["job"] == "two" for line in lines)

        every = [start(job, replica, "policy.min_replicas=2") for job in steps for replica in ("r0", "r1")]
        while decided() < 3:
            time.sleep(0.05)
        every.pop().end()
        stranger = start("two", "r9", "model.width=32")
        assert stranger.process.wait(200.0) == 2
        every.append(start("two", "r1", "policy.min_replicas=2"))
        assert [each.process.wait(200.0) for each in every] == [0] * 4
        folders = [str(each.folder) for each in every]
    check(report(tmp_path, head, *folders[:2]), deaths="No replica died.", steps=steps["one"])
    check(report(tmp_path, *folders[2:], head), deaths="1 death: r1 died at", steps=steps["two"])
    assert "2 runs compared" in report(tmp_path, head, *folders).text


def check(found: Page, *, deaths: str, steps: int, replicas: Sequence[str] = ("r0", "r1")) -> None:
    figures = found.figures()
    assert f", with {len(replicas)} replicas, and" in found.text and deaths in found.text
    assert "Merged from 3 folders of one job" in found.text
    came = re.search(r"it came to inner step ([0-9,]+)", found.text)
    assert came is not None and int(came[1].replace(",", "")) >= steps  # a replica trains on while another is away
    assert figures["lost by survivors"] == "0" and "counted twice" not in figures
    assert "pending at the end" not in figures and figures["final weights of 2 replicas"] == "identical"
