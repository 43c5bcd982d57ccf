"""A process at its limit of file descriptors: one line, and it goes on when there are some again."""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

LIMIT = 60

_AT_THE_LIMIT = """
import os, resource, sys, threading
from ftopt.transport.gloo import GlooTransport
from tests.transport.helpers import DictOps

told = []
transports, ops = [GlooTransport("127.0.0.1", 30.0) for _ in range(3)], DictOps()

def meet(key):
    def one(rank):
        try:
            transports[rank].connect(key=key, rank=rank, size=3, ops=ops).open()
            told.append(f"{key} {rank} open")
        except (ConnectionError, TimeoutError) as error:
            told.append(f"{key} {rank} {error}")
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]

meet("warm")
held = []
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for descriptor in held[:16]:
    os.close(descriptor)
meet("scarce")
for descriptor in held[16:]:
    os.close(descriptor)
meet("again")
print("\\n".join(told), flush=True)
os._exit(0)
"""


@pytest.mark.long
def test_gloo_is_not_asked_for_a_group_when_few_descriptors_are_left() -> None:
    """It would end the process (SIGABRT) when a connection cannot be accepted."""
    done = subprocess.run([sys.executable, "-c", _AT_THE_LIMIT], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if "open" in line.split()[2:3]) == sorted(
        f"{key} {rank} open" for key in ("warm", "again") for rank in range(3)
    )
    scarce = [line for line in lines if line.startswith("scarce")]
    assert any(
        re.search(r"\d+ file descriptors are left, a process group of 3 needs 38: .*ulimit -n", x) for x in scarce
    )
    assert "file descriptors are left" in done.stderr, "the log says so, too"


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


@pytest.mark.long
def test_a_coordinator_without_descriptors_says_so_once_and_recovers(tmp_path: Path) -> None:
    """Strangers that only connect are put out by their number; here they hold more than that."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "ftopt", "coordinator", "--bind", "127.0.0.1:0"]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, preexec_fn=_limited) as server,
    ):
        try:
            assert server.stdout is not None
            url = server.stdout.readline().decode().split()[2].rstrip(";")
            port = int(url.rpartition(":")[2])
            with ExitStack() as held:
                for _ in range(3 * LIMIT):
                    stranger = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                    stranger.sendall(b"GET /status HTTP/1.1\r\nHost: h\r\n\r\n")  # admitted, and kept open
                _until(lambda: b"no connection can be accepted" in log.read_bytes())
                _until(lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) >= LIMIT - 1)
            _until(lambda: _answers(f"{url}/status"))
            said = log.read_text()
            assert said.count("no connection can be accepted: Too many open files") == 1
            assert "Traceback" not in said
            assert len(said) < 2000
        finally:
            server.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _until(true: object) -> None:
    deadline = time.monotonic() + 60
    assert callable(true)
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
