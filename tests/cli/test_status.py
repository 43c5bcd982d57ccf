"""``ftopt status``: tables, JSON, and one message for whatever is wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ftopt.cli.main import main
from ftopt.cli.status import describe
from tests.sync.server.access import TOKEN, coordinator, coordinator_thread, identity, scripted

STATUS: dict[str, Any] = {
    "job": "bytes",
    "epoch": 7,
    "phase": "running",
    "fragments": [
        {"version": 9, "inner_step": 450, "proposed": ["r0", "r1"], "attempt": None, "attempts": 12,
         "attempts_aborted": 3},
    ],
    "replicas": [
        {"replica": "r0", "incarnation": 1, "state": "waiting", "stalled": False, "inner_step": 500, "step_s": 0.01234,
         "versions": [9]},
        {"replica": "node-17", "incarnation": 2, "state": "away", "stalled": False, "inner_step": 0, "step_s": 0.0,
         "versions": [None]},
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FTOPT_TOKEN", "FTOPT_CA"):
        monkeypatch.delenv(name, raising=False)


def test_a_job_is_a_line_and_two_tables() -> None:
    assert describe(STATUS).splitlines() == [
        "job bytes: running, inner step 450",
        "",
        "fragment  version  round       attempts  aborted",
        "       0        9  2 proposed        12        3",
        "",
        "replica  state    incarnation  inner step  s/step  version",
        "r0       waiting            1         500  0.0123  9",
        "node-17  away               2           0  -       -",
    ]


def test_a_job_that_does_not_run_says_why_and_many_fragments_are_told_as_a_range() -> None:
    phase = "halted: the journal j cannot be written (database or disk is full)"
    assert describe({**STATUS, "phase": phase, "fragments": [], "replicas": []}) == f"job bytes: {phase}"
    replica = {**STATUS["replicas"][0], "versions": [4, 5, 5, None, 6], "stalled": True}
    shown = describe({**STATUS, "fragments": STATUS["fragments"] * 5, "replicas": [replica]}).splitlines()
    assert shown[-1] == "r0       stalled            1         500  0.0123  4 to 6"
    assert len(shown) == 1 + 1 + 6 + 1 + 2


def test_what_a_replica_says_of_itself_does_not_steer_the_terminal() -> None:
    replica = {**STATUS["replicas"][0], "state": "\x1b[2J\nall is well"}
    shown = describe({**STATUS, "replicas": [replica]})
    assert "\x1b" not in shown
    assert "?[2J?all is well" in shown


async def _a_running_job(check: Callable[[str], None]) -> None:
    async with coordinator(token=None) as url, scripted(url, identity("one"), token=None) as replica:
        await replica.join()
        await replica.outer_step()
        async with scripted(url, identity("two"), token=None) as other:
            await other.join()
            await asyncio.to_thread(check, url)


def test_the_jobs_of_a_real_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    def check(url: str) -> None:
        assert main(["status", url]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[0] == "job one: running, inner step 5"
        assert "job two: running, inner step 0" in shown
        assert main(["status", f"{url}/", "--job", "two", "--json"]) == 0
        (job,) = json.loads(capsys.readouterr().out)["jobs"]
        assert (job["job"], job["replicas"][0]["replica"]) == ("two", "r0")
        assert main(["status", url, "--job", "three"]) == 2
        assert capsys.readouterr().err == f"ftopt: job 'three' is not known at {url}; its jobs: one, two\n"

    asyncio.run(_a_running_job(check))


def test_a_coordinator_without_jobs_and_without_the_token(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator_thread(token=None) as url:
        assert main(["status", url]) == 0
        assert "no jobs yet" in capsys.readouterr().out
        assert main(["status", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"jobs": []}
        assert main(["status", url, "--job", "a"]) == 2
        assert "it has no jobs yet" in capsys.readouterr().err
    with coordinator_thread(token=TOKEN) as url:
        assert main(["status", url]) == 2
        error = capsys.readouterr().err
        assert "answers 401" in error
        assert "--token-file" in error


@contextmanager
def somebody(answer: bytes) -> Iterator[str]:
    """A server that answers one request so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.9\r\n", "no coordinator answers"),
        (b"", "no coordinator answers"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "is this an ftopt coordinator?"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "is this an ftopt coordinator?"),
        (b"HTTP/1.0 200 OK\r\n\r\n[1]", "is this an ftopt coordinator?"),
    ],
)
def test_somebody_else_answers(answer: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with somebody(answer) as url:
        assert main(["status", url]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert url in error
    assert words in error


@pytest.mark.parametrize("url", ["localhost:1", "http://", "http://127.0.0.1:port", "http://a b", "http://\u2603"])
def test_what_is_no_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", url]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ftopt: ")
    assert error.count("\n") == 1
