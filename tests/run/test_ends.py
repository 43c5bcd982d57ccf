"""How a launch's replicas end: what they write themselves, and what the launcher makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ftopt.common.launched import END, read_end
from ftopt.run.processes import Child
from ftopt.run.scripts.ends import Ends
from ftopt.watch.folder import RunFolder


def script(path: Path, source: str, *, launched: bool = True) -> tuple[int, str, dict[str, object]]:
    """Runs a script; its exit status, what it wrote, and how it says that it has ended."""
    (path / "script.py").write_text(source)
    environment = os.environ | ({END: str(path / "end")} if launched else {})
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, read_end(path / "end")


def test_a_mistake_ends_a_launched_script_with_status_2_and_one_message(tmp_path: Path) -> None:
    source = "import ftopt\n\ndef method():\n    return ftopt.DiLoCo(sync_every=0)\n\nmethod()\n"
    status, said, told = script(tmp_path, source)
    assert status == 2 and "Traceback" not in said
    assert said.startswith("ftopt: sync_every=0") and said.endswith(
        "script.py, line 4: return ftopt.DiLoCo(sync_every=0)\n"
    )
    assert told == {"mistake": said.removeprefix("ftopt: ").partition("\n")[0]}
    (tmp_path / "end").unlink()
    status, said, told = script(tmp_path, source, launched=False)
    assert (status, told) == (1, {}) and "Traceback" in said, "other programs are not affected"


def test_a_rank_of_an_island_writes_the_message_too(tmp_path: Path) -> None:
    source = """
import ftopt, torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
raise ftopt.errors.UserError("wrong")
"""
    status, said, told = script(tmp_path, source)
    assert (status, told) == (2, {"mistake": "wrong"}) and said.startswith("ftopt: wrong\n")


@pytest.mark.parametrize("error", ["ftopt.errors.Unreachable('gone')", "ftopt.errors.JobFailed('x')"])
def test_other_errors_end_it_as_ever(tmp_path: Path, error: str) -> None:
    status, said, told = script(tmp_path, f"import ftopt\nraise {error}\n")
    assert (status, told) == (1, {}) and "Traceback" in said


def test_an_error_of_the_scripts_own_tells_its_type_and_place(tmp_path: Path) -> None:
    status, said, told = script(tmp_path, "import ftopt, json\njson.loads('')\n")
    assert status == 1 and "Traceback" in said
    assert told == {"error": "JSONDecodeError", "place": f"\n    at {tmp_path}/script.py, line 2: json.loads('')"}


def test_an_error_that_may_pass_by_itself_is_not_compared(tmp_path: Path) -> None:
    assert script(tmp_path, "import ftopt\nopen('absent')\n")[2] == {}


def test_a_hook_of_the_users_own_gets_all_other_errors(tmp_path: Path) -> None:
    source = (
        "import sys\nsys.excepthook = lambda *_: print('theirs', file=sys.stderr)\nimport ftopt\nraise ValueError\n"
    )
    assert script(tmp_path, source)[:2] == (1, "theirs\n")


class Launched:
    """A folder in which replicas have ended."""

    def __init__(self, path: Path, ranks: int = 1) -> None:
        self.folder = RunFolder(path)
        self.folder.create()
        self.ends = Ends(self.folder, ranks=ranks)

    def ended(self, replica: str, status: int, end: str = "", said: str = "", *, here: bool = False) -> str:
        """How it has ended, in words."""
        self.ends.begin(replica).write_text(end)
        process = SimpleNamespace(poll=lambda **_: status)
        child = cast(Child, SimpleNamespace(name=replica, process=process, said=lambda **_: said))
        self.ends.take(child, here=here)
        return self.ends.how(child)


def test_replicas_are_done_asked_to_leave_mistaken_or_dead(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    it.ended("done", 0, '{"early": false, "steps": 10, "pending": 0}')
    it.ended("asked", 0, '{"early": true, "steps": 5, "pending": 2}')
    it.ended("other", 2, '{"mistake": "another model"}')
    it.ended("parent", 1, '{"mistake": "of a child that it survived"}')
    it.ended("options", 2, said="usage: x\nx: error: no --lr")
    it.ended("silent", 2)
    it.ended("failed", 1, said="ValueError")
    it.ended("killed", -signal.SIGKILL, '{"mistake": "of a child that it survived"}')
    it.ended("late", 2, '{"mistake": "the job has ended at version 3"}')
    it.ended("damaged", 0, "{")
    assert it.ends.done == {"done", "damaged"} and it.ends.early == {"asked"}
    assert it.ends.mistakes == {
        "other": "another model",
        "options": "x: error: no --lr",
        "silent": "exit status 2",
    }
    why = it.ends.why_failed("x.py", tmp_path)
    assert "other has failed, and was not started again, since no restart mends this: another model" in why
    assert "no replica" not in why


def test_the_error_that_ends_a_script_is_named_with_its_status(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    assert it.ended("a", 1, said="Traceback\nValueError: bad batch 17") == "exit status 1: ValueError: bad batch 17"
    assert it.ended("a", -signal.SIGKILL, said="ValueError: handled") == "SIGKILL"
    assert it.ended("b", 3) == "exit status 3"


def error(place: str, version: int, inner_step: int, kind: str = "KeyError") -> str:
    """What a replica says that ends by an error."""
    return json.dumps({"error": kind, "place": place, "version": version, "inner_step": inner_step})


def test_the_same_error_at_the_same_step_again_and_again_is_no_accident(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    for _ in range(2):
        it.ended("bug", 1, error("\n    at x.py, line 3: f()", 3, 35), said="KeyError: 'a'")
    assert not it.ends.repeated
    it.ended("bug", -signal.SIGKILL)
    it.ended("bug", 1, error("\n    at x.py, line 3: f()", 3, 35), said="KeyError: 'a'")
    assert it.ends.repeated == {"bug"}
    last = "since no restart mends this: KeyError: 'a' (3 times at inner step 35)\n    at x.py, line 3: f()"
    assert it.ends.why_failed("x.py", tmp_path).endswith(last)
    it.ended("r0", 0, '{"early": false, "steps": 100, "pending": 0}')
    assert not it.ends.why_failed("x.py", tmp_path), "the job is done"
    assert "bug failed: KeyError: 'a'." in it.ends.account("x.py", ["bug", "r0"], {"bug": 2})


@pytest.mark.parametrize(
    "then",
    [
        error("3", 3, 36),  # it has made progress
        error("3", 3, 20),  # of the same round
        '{"error": "KeyError", "place": "3"}',  # before it has joined
        error("3", 4, 41),
        error("3", 2, 29),  # of a job that starts again it comes at another time
        error("4", 3, 35),
        error("3", 3, 35, "ValueError"),
    ],
)
def test_an_error_that_comes_with_time_is_not_the_same(tmp_path: Path, then: str) -> None:
    it = Launched(tmp_path)
    for end in (error("3", 3, 35), error("3", 3, 35), then, then):
        it.ended("r0", 1, end, said="KeyError: 'a'")
    assert not it.ends.repeated and not it.ends.mistakes


def test_the_end_of_a_rank_that_follows_from_a_killed_one_is_not_compared(tmp_path: Path) -> None:
    it = Launched(tmp_path, ranks=2)
    for _ in range(3):
        it.ended("island", 1, error("3", 3, 35, "RuntimeError"), said="  exitcode  : -9 (pid: 41)")
    assert not it.ends.repeated


def test_a_process_that_comes_when_its_job_has_ended_has_not_come_to_the_end_of_the_script(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    it.ended("r0", 1, '{"steps": 100}', said="ValueError: no test set")
    it.ended("r0", 0, '{"over": "the job has ended at version 10, inner step 100"}')
    assert it.ends.late == {"r0": 0} and not it.ends.done
    assert it.ends.why_failed("x.py", tmp_path).endswith("r0 failed: ValueError: no test set")


def test_a_mistake_of_several_is_told_once(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    for replica in ("b", "a"):
        it.ended(replica, 2, '{"mistake": "another model"}')
    last = "a and b have failed, and were not started again, since no restart mends this: another model"
    assert it.ends.why_failed("x.py", tmp_path).splitlines()[-1] == last


def test_who_died_and_is_ended_while_it_starts_again_has_not_left(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    it.ended("w1", -signal.SIGKILL)
    it.ended("w1", -signal.SIGTERM)
    assert it.ends.account("x.py", ["w1"], {"w1": 1}).startswith("w1 failed or was ended before the end of x.py. w1 f")


def test_the_account_has_ends_steps_and_restarts(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    it.ended("a", 0, '{"early": false, "steps": 1000, "pending": 0}')
    it.ended("b", 0, '{"early": true, "steps": 500, "pending": 3}')
    assert it.ends.account("x.py", ["a", "b"], {}) == (
        "a came to the end of x.py; b left before the end of x.py.\n"
        "2 replicas of this launch took 1,500 inner steps, of which 3 are in no outer step. "
        "No replica was started again."
    )
    it.ended("c", -signal.SIGKILL)
    it.ended("c", 1)
    said = it.ends.account("x.py", ["a", "b", "c"], {"c": 1})
    assert "c failed or was ended before the end of x.py. c failed: exit status 1.\n" in said
    assert "(without those of 2 processes that died). c was started again 1 time." in said
    assert it.ends.why_failed("x.py", tmp_path) == ""


def test_an_islands_mistake_counts_though_torchrun_has_a_status_of_its_own(tmp_path: Path) -> None:
    it = Launched(tmp_path, ranks=2)
    it.ended("island", 1, '{"mistake": "another model"}')
    assert it.ends.mistakes == {"island": "another model"} and not it.ends.late
    it.ended("late", 1, '{"mistake": "the job has ended at version 3"}')
    assert it.ends.late == {"late": 0}
    it.ended("later", 2, '{"mistake": "the job has ended at version 3", "steps": 9, "pending": 2}')
    assert it.ends.came_late("later").endswith("is not started again: 2 inner steps of it are lost")


def test_a_process_that_ends_well_in_the_middle_of_its_job_has_not_come_to_the_end(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    it.ended("gone", 0, here=True)
    it.ended("left", 0, '{"early": false, "steps": 10, "pending": 0}', here=True)  # its last event is not read yet
    it.ended("alone", 0)
    assert it.ends.done == {"left", "alone"}
    it.ends.done.clear()
    assert "gone failed: it ended with status 0 without leaving its job" in it.ends.why_failed("x.py", tmp_path)


def test_a_job_that_makes_no_outer_steps_at_its_end_has_failed(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    it.ended("a", 0, '{"early": false, "steps": 10, "pending": 10}')
    assert it.ends.why_failed("x.py", tmp_path) == ""
    assert it.ends.why_failed("x.py", tmp_path, "halted: no room") == (
        "the job has halted: no room: what replicas trained since is in no version"
    )


def test_the_last_line_of_a_log_is_a_mistake_only_if_it_says_so(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    it.ended("r0", 2, said="replica r0: version 4 is averaged without r2")
    assert it.ends.mistakes == {"r0": "exit status 2"}


def test_on_a_full_disk_a_replica_that_ends_well_and_cannot_say_how_has_come_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Launched(tmp_path)
    monkeypatch.setattr(Ends, "_has_room", lambda self, replica: False)
    it.ended("a", 0, here=True)
    assert it.ends.done == {"a"}


def test_a_folder_that_has_room_is_left_as_it_was(tmp_path: Path) -> None:
    it = Launched(tmp_path)
    assert it.ends._has_room("a") and not [*it.folder.logs.iterdir()]
    it.folder.logs.rmdir()
    assert not it.ends._has_room("a")
