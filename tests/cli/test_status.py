"""``ftopt status``: tables, JSON, the same again and again, and one message for whatever is wrong."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ftopt.cli.status
from ftopt.cli.main import main
from ftopt.sync.protocol import messages as m
from ftopt.watch.status import describe, line, picture
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


def test_a_replica_whose_copies_nobody_keeps_is_marked() -> None:
    alone, away = ({**x, "not_kept": True} for x in STATUS["replicas"])
    rows = describe({**STATUS, "replicas": [alone, away]}).splitlines()[-2:]
    assert ["no copy kept" in row for row in rows] == [True, False]


def test_a_job_is_a_line_and_two_tables() -> None:
    assert describe(STATUS).splitlines() == [
        "job bytes: running, inner step 450",
        "",
        "fragment  version  round       attempts  failed",
        "       0        9  2 proposed        12       3",
        "",
        "replica  state    incarnation  inner step  steps/s  version",
        "r0       waiting            1         500       81        9",
        "node-17  away               2           0        -        -",
    ]


def test_losses_have_a_column_where_replicas_tell_them() -> None:
    first, second = STATUS["replicas"]
    rows = [first | {"loss": 2.345678}, first | {"loss": "nan"}, first | {"loss": None}, second | {"loss": 1.0}]
    assert describe({**STATUS, "replicas": rows}).splitlines()[-5:] == [
        "replica  state    incarnation  inner step  steps/s   loss  version",
        "r0       waiting            1         500       81  2.346        9",
        "r0       waiting            1         500       81    nan        9",
        "r0       waiting            1         500       81      -        9",
        "node-17  away               2           0        -      -        -",
    ]


def test_a_job_that_does_not_run_says_why_and_many_fragments_are_told_as_a_range() -> None:
    phase = "halted: the journal j cannot be written (database or disk is full)"
    assert describe({**STATUS, "phase": phase, "fragments": [], "replicas": []}) == f"job bytes: {phase}"
    replica = {**STATUS["replicas"][0], "versions": [4, 5, 5, None, 6], "stalled": True}
    shown = describe({**STATUS, "fragments": STATUS["fragments"] * 5, "replicas": [replica]}).splitlines()
    assert shown[-1] == "r0       stalled            1         500       81  4 to 6"
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


def test_a_coordinator_without_jobs_and_without_the_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FTOPT_TOKEN", raising=False)
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
        assert "answers 401 Unauthorized; give the token that it was started with: --token-file" in error
        monkeypatch.setenv("FTOPT_TOKEN", TOKEN.upper() + "x")
        assert main(["status", url]) == 2
        assert "Unauthorized; it does not accept this token; give the token" in capsys.readouterr().err


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
        thread.join(60)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.9\r\n", "no coordinator answers"),
        (b"", "no coordinator answers"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "is this an ftopt coordinator?"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "is this an ftopt coordinator?"),
        (b"HTTP/1.0 200 OK\r\n\r\n[1]", "is this an ftopt coordinator?"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"jobs": [{"job": "x", "phase": "running"}]}', "Of this version?"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 10_000, "is this an ftopt coordinator?"),
    ],
)
def test_somebody_else_answers(answer: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with somebody(answer) as url:
        assert main(["status", url]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert url in error
    assert words in error


@pytest.mark.parametrize(
    "url", ["localhost:1", "http://", "http://127.0.0.1:port", "http://a b", "http://\u2603", "http://[::1"]
)
def test_what_is_no_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", url]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ftopt: ")
    assert error.count("\n") == 1


# ------------------------------------------------------------ --watch


def crowd(count: int) -> dict[str, Any]:
    """A job in whose round one replica has proposed and most are awaited."""
    replicas = [{**STATUS["replicas"][0], "replica": f"node-{i // 8}-r{i}", "state": "training"} for i in range(count)]
    replicas[0]["state"] = "waiting"
    replicas[count // 2]["stalled"] = True
    names = [x["replica"] for x in replicas]
    doing = f"1 of {count - 1} have proposed; it waits for {', '.join(names[1:6])} and {count - 7} more"
    fragment = {**STATUS["fragments"][0], "proposed": names[:1], "waits_for": names[-3:], "doing": doing}
    return {**STATUS, "fragments": [fragment], "replicas": replicas}


@pytest.mark.parametrize("size", [(80, 24), (80, 50), (200, 45), (40, 20)])
@pytest.mark.parametrize("count", [2, 64])
def test_a_picture_fits_the_terminal(size: tuple[int, int], count: int) -> None:
    width, height = size
    job = crowd(count) if count > 2 else STATUS
    rows = picture([job], width, height).splitlines()
    assert max(map(len, rows)) <= width
    assert len(rows) <= max(height, 12)


def test_a_wide_terminal_shows_all_replicas_and_a_small_one_those_that_matter() -> None:
    job = crowd(64)
    wide, small = picture([job], 200, 45), picture([job], 80, 24)
    shown = [set(re.findall(r"node-\d-r\d+ ", x)) for x in (wide, small)]
    assert len(shown[0]) == 64
    assert {"node-4-r32 ", "node-7-r61 ", "node-7-r62 ", "node-7-r63 "} < shown[1]
    assert small.splitlines()[-1].endswith(f"{64 - len(shown[1])} more replicas: {64 - len(shown[1])} training")
    assert "node-7-r63  training, awaited" in small
    assert wide.index("node-0-r2 ") < wide.index("node-1-r10 ")


def test_a_job_is_one_line_in_a_log() -> None:
    assert line(STATUS) == "job bytes: running, inner step 450; 1 of 2 replicas connected: 1 waiting"
    assert line({**STATUS, "phase": "halted: disk full", "fragments": [], "replicas": []}) == (
        "job bytes: halted: disk full"
    )
    assert line(crowd(9)).endswith(
        "; 9 of 9 replicas connected: 7 training, 1 stalled, 1 waiting; version 10: 1 of 8 have proposed; "
        "it waits for node-0-r1, node-0-r2, node-0-r3, node-0-r4, node-0-r5 and 2 more"
    )


def _between(monkeypatch: pytest.MonkeyPatch, *happens: Callable[[], None]) -> None:
    """What happens between two answers of ``--watch``; then Ctrl-C."""
    left = iter(happens)

    def pause(every_s: float) -> None:
        if (happen := next(left, None)) is None:
            raise KeyboardInterrupt
        happen()

    monkeypatch.setattr(ftopt.cli.status, "_pause", pause)


@pytest.mark.parametrize("as_json", [False, True])
def test_in_a_log_watch_outlives_the_coordinator(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    server = coordinator_thread(token=None, port=port)
    url = server.__enter__()
    servers = [server]

    def stop() -> None:
        servers.pop().__exit__(None, None, None)

    def start() -> None:
        servers.append(coordinator_thread(token=None, port=port))
        servers[0].__enter__()

    _between(monkeypatch, stop, lambda: None, start)
    try:
        assert main(["status", url, "--watch", "0.5", *(["--json"] if as_json else [])]) == 0
    finally:
        for x in servers:
            x.__exit__(None, None, None)
    out, error = capsys.readouterr()
    if as_json:
        assert [json.loads(x) for x in out.splitlines()] == [{"jobs": []}] * 2
        assert error.count("no answer since") == error.count("\n") == 1
    else:
        texts = [re.sub(r"\d\d:\d\d:\d\d", "T", x) for x in out.splitlines()]
        assert texts[0] == "T  no jobs yet; a job starts when its first replica connects"
        assert texts[1].startswith("T  no answer since T: no coordinator answers at")
        assert texts[2:] == ["T  the coordinator answers again", texts[0]]


def test_watch_ends_with_an_error_if_there_is_no_first_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        assert main(["status", f"http://127.0.0.1:{nobody.getsockname()[1]}", "--watch"]) == 2
    assert "no coordinator answers" in capsys.readouterr().err


async def _ended(check: Callable[[str], None]) -> None:
    two = {"start_replicas": 2, "dead_after_s": 30.0, "evict_after_s": 60.0}
    async with coordinator(token=None) as url:
        async with (
            scripted(url, identity("one", settings=two), token=None) as replica,
            scripted(url, identity("one", "r1", settings=two), token=None) as other,
        ):
            await asyncio.gather(replica.join(), other.join())
            await other.send(m.Bye())
            assert await other.ended()
            await replica.outer_step()
            await replica.send(m.Bye())
            assert await replica.ended()
            await asyncio.to_thread(check, url)
        await asyncio.to_thread(check, url)
        async with scripted(url, identity("one", "r2", settings=two), token=None) as late:
            for effect in late.machine.connect():
                await late.send(effect.message)  # type: ignore[union-attr]
            hold = await late.until(m.Hold)
            assert hold.text == (
                "job 'one' has ended at version 1, inner step 5: no replica is left; a checkpoint can be resumed; a "
                "replica that connects without one starts it over"
            )
        await asyncio.to_thread(check, url)


def test_a_job_that_has_ended_is_shown_with_its_last_version_and_latecomers_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def check(url: str) -> None:
        assert main(["status", url]) == 0
        assert capsys.readouterr().out == "job one: ended at version 1, inner step 5: no replica is left\n"

    asyncio.run(_ended(check))


def test_after_a_restart_the_jobs_of_the_journal_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, one = tmp_path / "journal", {"start_replicas": 1}

    async def run() -> None:
        async with coordinator(token=None, journal=journal) as url:
            async with scripted(url, identity("one", settings=one), token=None) as replica:
                await replica.join()
                await replica.outer_step()
                await replica.send(m.Bye())
                assert await replica.ended()
            async with scripted(url, identity("two", settings=one), token=None) as replica:
                await replica.join()
                await replica.outer_step()
                await replica.outer_step()
        async with coordinator(token=None, journal=journal) as url:
            assert await asyncio.to_thread(main, ["status", url]) == 0
            async with scripted(url, identity("two", settings=one), token=None) as replica:
                for effect in replica.machine.connect():
                    await replica.send(effect.message)  # type: ignore[union-attr]
                await replica.until(m.Hold)
                assert await asyncio.to_thread(main, ["status", url, "--job", "two"]) == 0

    asyncio.run(run())
    ended, away, again = capsys.readouterr().out.split("\n\n")[:3]
    assert ended == "job one: ended at version 1, inner step 5: no replica is left"
    job = "job two: not running: it had come to version 2, inner step 10; no replica has connected since the"
    assert away.startswith(f"{job} coordinator started\njob two: ")
    assert "no replica has connected" not in again and again.startswith("replica")


def test_without_an_address_it_asks_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FTOPT_COORDINATOR", raising=False)
    monkeypatch.setattr(ftopt.cli.status, "local_jobs", list)  # the user may have some
    with coordinator_thread(token=None) as url:
        monkeypatch.setattr(ftopt.cli.status, "_HERE", url)
        assert main(["status"]) == 0
        assert "no jobs yet" in capsys.readouterr().out
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setattr(ftopt.cli.status, "_HERE", url)
        assert main(["status"]) == 2
    error = capsys.readouterr().err
    assert f"no coordinator answers at {url}" in error and "give its address: `ftopt status http://HOST:PORT`" in error
    monkeypatch.setenv("FTOPT_COORDINATOR", "head:29410")
    assert main(["status"]) == 2
    assert "'head:29410' is not an address" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9"])
def test_watch_takes_a_sensible_time(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "http://127.0.0.1:1", f"--watch={seconds}"]) == 2
    assert "must be 0.2 to 3600 seconds" in capsys.readouterr().err


def test_an_address_after_watch_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--watch", "http://127.0.0.1:1"])
    assert "the address comes first" in capsys.readouterr().err


class Terminal:
    """A process on a terminal of 80 columns and 24 lines."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.text, self._decoder = "", codecs.getincrementaldecoder("utf-8")()
        os.set_blocking(self._master, False)

    def until(self, words: str, limit_s: float = 60.0) -> None:
        """Reads until ``words`` were written since the last call."""
        end_s = time.monotonic() + limit_s
        while words not in self.text:
            assert time.monotonic() < end_s, f"no {words!r} in {self.text!r}"
            try:
                self.text += self._decoder.decode(os.read(self._master, 1 << 16))
            except BlockingIOError:
                time.sleep(0.02)
        self.text = self.text.partition(words)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        os.close(self._master)


def test_on_a_terminal_watch_redraws_in_place_and_ends_cleanly_on_ctrl_c() -> None:
    with coordinator_thread(token=None) as url:
        terminal = Terminal(sys.executable, "-m", "ftopt", "status", url, "--watch", "0.2")
        try:
            terminal.until("Ctrl-C ends this")
            terminal.until("no jobs yet")
            terminal.until("\x1b[1A")  # up again
            terminal.process.send_signal(signal.SIGINT)
            terminal.until("\x1b[?25h")  # the cursor is back
            assert terminal.process.wait(60) == 0
        finally:
            terminal.close()


def test_a_job_without_a_connected_replica_says_so() -> None:
    away = {**STATUS, "replicas": [{**x, "state": "away"} for x in STATUS["replicas"]]}
    assert describe(away).splitlines()[0].endswith(", no replica is connected")
    assert "no replica is connected" not in describe(STATUS)
