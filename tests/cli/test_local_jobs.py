"""``ftopt ps``, ``ftopt stop`` and ``ftopt status`` without an address, with real processes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftopt.run.local_jobs import LocalJob, announce, folder_of_jobs, is_stopping, local_jobs
from ftopt.run.status_of import token_at
from tests.run.running import until

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of jobs for each test."""
    path = tmp_path / "runtime"
    path.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", None)  # which is read from TMPDIR again
    monkeypatch.delenv("FTOPT_COORDINATOR", raising=False)
    return path


def ftopt(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ftopt", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def coordinators(tmp_path: Path) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    """Two coordinators and their addresses; the second one asks for a token."""
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    begun, found = [], []
    for words in ([], ["--token-file", str(tmp_path / "token")]):
        command = [sys.executable, "-m", "ftopt", "coordinator", "--bind", "127.0.0.1:0", *words]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
    for process in begun:
        assert process.stdout is not None
        match = re.search(r"http://\S+", process.stdout.readline())
        assert match is not None
        found.append((process, match[0]))
    yield found
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_jobs_are_listed_shown_and_stopped(coordinators: list[tuple[subprocess.Popen[str], str]]) -> None:
    (one, url), (other, guarded) = coordinators
    until(lambda: len(local_jobs()) == 2, LIMIT_S)
    names = [f"coordinator-{address.rpartition(':')[2]}" for address in (url, guarded)]

    status, said = ftopt("ps")
    assert status == 0
    for name, address, process in zip(names, (url, guarded), (one, other), strict=True):
        assert re.search(rf"^{name}  {address}  \(process {process.pid}, for 0:\d\d\)$", said, re.MULTILINE)
    assert said.count("no jobs yet; a job starts when its first replica connects") == 2
    listed = json.loads(ftopt("ps", "--json")[1])["commands"]
    assert {each["name"] for each in listed} == set(names)

    assert ftopt("status") == (0, "no jobs yet; a job starts when its first replica connects\n")
    status, said = ftopt("stop")
    assert status == 2
    assert "2 jobs run on this machine; name one, or give --all" in said
    for words in (["nobody"], ["coordinator-"], ["--all", names[0]]):
        assert ftopt("stop", *words)[0] == 2
    assert one.poll() is other.poll() is None

    status, said = ftopt("stop", names[0])
    assert (status, said.splitlines()[-1]) == (0, "1 job ended")
    assert one.wait(LIMIT_S) == 0
    assert [job.name for job in local_jobs()] == [names[1]]
    other.kill()
    other.wait(LIMIT_S)
    assert ftopt("ps") == (0, "no job of yours runs on this machine\n")
    assert ftopt("stop", "--all") == (2, "ftopt: no job of yours runs on this machine\n")


def test_a_token_is_for_the_address_that_its_job_has_announced(runtime: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    announced = announce("launch", "a", "http://127.0.0.1:29411", token_file=token)
    for url in ("http://127.0.0.1:29411", "http://localhost:29411"):
        assert token_at(url) == "0123456789abcdef"
    for url in ("http://10.0.0.5:29411", "http://127.0.0.2:29411", "https://127.0.0.1:29411", "http://127.0.0.1:29412"):
        assert token_at(url) is None
    announced.close()
    elsewhere = announce("coordinator", "b", "http://10.0.0.5:29411", token_file=token)
    assert token_at("http://127.0.0.1:29411") is None
    elsewhere.close()
    assert token_at("http://10.0.0.5:29411") is None


def test_an_announcement_lasts_until_it_is_closed(runtime: Path, tmp_path: Path) -> None:
    announced = announce("run", "a", "http://127.0.0.1:1", folder=tmp_path)
    (job,) = local_jobs()
    assert (job.name, job.pid, job.folder, job.token_file) == ("a", os.getpid(), str(tmp_path), None)
    assert job.lives()
    assert folder_of_jobs().stat().st_mode & 0o777 == 0o700
    announced.close()
    announced.close()
    assert local_jobs() == []
    assert list((runtime / "ftopt").iterdir()) == []


def test_a_file_of_a_process_that_was_killed_is_removed(runtime: Path) -> None:
    announce("run", "a", "http://127.0.0.1:1").close()
    left = runtime / "ftopt" / "1.json"
    left.write_text("{}")
    assert local_jobs() == []
    assert not left.exists()


def test_a_process_that_has_taken_the_number_of_another_is_no_job(runtime: Path) -> None:
    announce("run", "a", "http://127.0.0.1:1").close()
    path = runtime / "ftopt" / "9.json"
    job = {"kind": "run", "name": "a", "url": "u", "pid": os.getpid(), "began_s": 0.0, "ticks": 1}
    for text in (json.dumps(job), "no json", "{}"):
        path.write_text(text)
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert local_jobs() == []
        assert path.exists()
    assert not LocalJob("run", "a", "u", 2**22 + 1, 0.0, 1).lives()


def test_a_folder_that_others_may_write_to_is_not_used(runtime: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("ftopt", f"ftopt-{os.getuid()}"):
        (runtime / name).mkdir()
        (runtime / name).chmod(0o777)
    announce("run", "a", "http://127.0.0.1:1").close()
    assert "belongs to another user, or others may write to it; `ftopt ps` does not show this job" in caplog.text
    assert local_jobs() == []


@pytest.mark.parametrize("given", [None, "", "relative", "/nowhere"])
def test_without_a_runtime_folder_it_is_below_the_temporary_one(
    monkeypatch: pytest.MonkeyPatch, runtime: Path, given: str | None
) -> None:
    """A session with a runtime folder sees the jobs of one without."""
    if given is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
    announced = announce("launch", "b", "http://127.0.0.1:1")
    assert folder_of_jobs() == runtime / f"ftopt-{os.getuid()}"
    assert [job.name for job in local_jobs()] == ["b"]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert [job.name for job in local_jobs()] == ["b"]
    announced.close()


def test_a_job_that_was_asked_to_stop_is_not_asked_again(runtime: Path) -> None:
    announced = announce("launch", "b", "http://127.0.0.1:1")
    (job,) = local_jobs()
    assert not is_stopping(job)
    assert not is_stopping(job, now=True)
    assert is_stopping(job, now=True)
    announced.close()
    assert list((runtime / "ftopt").iterdir()) == []


def test_what_is_no_job_is_passed_over(runtime: Path) -> None:
    announce("run", "a", "http://127.0.0.1:1").close()
    folder = runtime / "ftopt"
    os.mkfifo(folder / "1.json")
    (folder / "2.json").symlink_to("/dev/zero")
    job = {"kind": "run", "name": "a\x1b[31m", "url": "u", "pid": os.getpid(), "began_s": "x", "ticks": 1}
    (folder / "3.json").write_text(json.dumps(job))
    with (folder / "3.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert local_jobs() == []
