"""A job that is resumed while it runs says so on both sides; whoever takes a dead process's place hears nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ftopt
from ftopt.checkpoint.writing_process import Mark, WritingProcess, _started

START = "0123abcd"


def mark_of(folder: Path, **other: object) -> Mark:
    """The mark of a process that differs from this one in that."""
    mark = Mark("r0")
    mark._own = replace(mark._own, **other)  # type: ignore[arg-type]
    assert mark.leave(folder, START) is None
    return mark


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as there:
        try:
            yield there
        finally:
            there.kill()


def test_who_resumes_hears_of_a_living_process_until_that_is_dead(tmp_path: Path) -> None:
    with process() as there:
        mark_of(tmp_path, pid=there.pid, started=_started(there.pid), since="noon")
        other = Mark("r0").living(tmp_path, START)
        assert isinstance(other, WritingProcess) and (other.pid, other.since) == (there.pid, "noon")
        assert Mark("r1").living(tmp_path, START) is None, "another replica"
        assert Mark("r0").living(tmp_path, "another0") is None, "another job"
        there.kill()
        (Path("/proc") / str(there.pid) / "stat").read_bytes()  # not waited for: a zombie
        while _started(there.pid):
            pass
        assert Mark("r0").living(tmp_path, START) is None
    assert Mark("r0").living(tmp_path, START) is None


@pytest.mark.parametrize(
    "case", ["its number is used again", "on another host", "this process", "a system without /proc"]
)
def test_a_mark_whose_process_is_not_known_to_live_says_nothing(tmp_path: Path, case: str) -> None:
    with process() as there:
        living = {"pid": there.pid, "started": _started(there.pid)}
        others: dict[str, dict[str, object]] = {
            "its number is used again": living | {"started": _started(there.pid) + "0"},
            "on another host": living | {"host": "elsewhere"},
            "this process": {},
            "a system without /proc": living | {"started": ""},
        }
        mark_of(tmp_path, **others[case])
        mark = Mark("r0")
        assert mark.living(tmp_path, START) is None
        for _ in range(3):
            assert mark.leave(tmp_path, START) is None


def test_two_that_write_in_turns_name_each_other_once(tmp_path: Path) -> None:
    """Also on two hosts, where neither knows whether the other lives."""
    one, other = mark_of(tmp_path), mark_of(tmp_path, host="elsewhere")
    named = [(one.leave(tmp_path, START), other.leave(tmp_path, START)) for _ in range(4)]
    assert named == [(None, None), (other._own, one._own), (None, None), (None, None)]


def test_a_process_that_was_replaced_and_finishes_its_last_write_is_not_named(tmp_path: Path) -> None:
    for host in ("a", "b", "c", "d"):
        hung = mark_of(tmp_path, host=host)
        mark = Mark("r0")
        assert mark.leave(tmp_path, START) is None
        assert hung.leave(tmp_path, START) is None
        assert [mark.leave(tmp_path, START) for _ in range(3)] == [None] * 3


def test_a_process_whose_job_begins_anew_marks_the_new_one_alone(tmp_path: Path) -> None:
    mark = mark_of(tmp_path, host="elsewhere")
    for _ in range(3):
        assert mark.leave(tmp_path, "another0") is None
    assert [path.name for path in tmp_path.iterdir()] == [".replica-r0-another0.writer"]


def test_a_mark_is_removed_by_its_own_process_alone(tmp_path: Path) -> None:
    one = mark_of(tmp_path)
    other = mark_of(tmp_path, host="elsewhere")
    one.remove()
    assert len(list(tmp_path.iterdir())) == 1
    other.remove()
    assert not list(tmp_path.iterdir())
    other.leave(tmp_path, START)
    assert not list(tmp_path.iterdir()), "the last write ends after leaving"


def test_a_loop_that_an_exception_ends_leaves_no_mark_although_its_process_lives(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=2), group=ftopt.solo())
    checkpoints = ftopt.Checkpoints(tmp_path, optimizer, every=1)
    with pytest.raises(KeyboardInterrupt), optimizer:
        for _ in range(4):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            checkpoints.step()
            assert checkpoints._writer.wait(30)
        assert len(list(tmp_path.glob(".*.writer"))) == 1
        raise KeyboardInterrupt
    checkpoints.close()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "a"}', '{"host": 1, "pid": -1, "started": "", "since": ""}'])
def test_a_file_that_is_no_mark_is_replaced(tmp_path: Path, text: str) -> None:
    mark = mark_of(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert mark.living(tmp_path, START) is None and mark.leave(tmp_path, START) is None
    assert "host" in file.read_text()


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    mark = Mark("r0")
    assert mark.leave(tmp_path / "missing", START) is None
    mark.remove()


# A real job, whose script is run again.

_SCRIPT = """
import logging, sys
from pathlib import Path
import torch
from torch import nn
import ftopt

logging.basicConfig(level=logging.WARNING, format="%(message)s")
model = nn.Linear(3, 1)
optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, ftopt.LocalSGD(sync_every=2))
checkpoints = ftopt.Checkpoints("job", optimizer, every=1)
checkpoints.resume()
with optimizer:
    if sys.argv[1:]:
        print("takes part", file=sys.stderr, flush=True)
    end = optimizer.inner_step + 8 if not sys.argv[1:] else 1 << 40
    while optimizer.inner_step < end and not Path("stop").exists():
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        checkpoints.step()
        assert checkpoints._writer.wait(60)
checkpoints.close()
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_both_sides_hear_of_it_and_no_honest_start_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "train.py", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def until(process: subprocess.Popen[str], text: str) -> str:
        assert process.stderr is not None
        return next(line for line in process.stderr if text in line)

    for _ in range(2):  # a new job; resumed after its end
        with start() as once:
            assert "also writes" not in once.communicate()[1] and once.returncode == 0
    with start("on") as killed:  # resumed after a kill
        until(killed, "takes part")
        killed.kill()
    with start() as after:
        assert "also writes" not in after.communicate()[1] and after.returncode == 0
    with start("on") as one:
        until(one, "takes part")
        with start("on") as other:
            assert f"process {one.pid} on " in until(other, "also writes this replica's checkpoints")
            assert f"process {other.pid} on " in until(one, "also writes this replica's checkpoints")
            (tmp_path / "stop").touch()
            assert "also writes" not in other.communicate()[1] + one.communicate()[1]
    assert not list((tmp_path / "job").glob(".*")), "both have left in good order"
