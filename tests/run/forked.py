"""The processes that ``ftopt run`` starts, as forks of its own: what they would import for seconds is there already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import ftopt.run.processes as processes
from ftopt.cli.main import main

_CONTEXT = multiprocessing.get_context("fork")


def use_forks() -> None:
    """From now on this process, which has one thread, forks instead of starting ``python -m ftopt``."""
    _Forked.open_before = _open_files()
    names = ("PIPE", "TimeoutExpired")
    processes.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_Forked, **{name: getattr(subprocess, name) for name in names}
    )


def _open_files() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}


class _Forked:
    """What `ftopt.run.processes.Child` needs of a `subprocess.Popen`."""

    open_before: set[int]

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int | IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        assert list(command[:3]) == [sys.executable, "-m", "ftopt"]
        assert stdin == subprocess.PIPE and start_new_session
        read, ours = os.pipe()
        self.stdin, self.stdout = os.fdopen(ours, "wb"), None
        out = stderr.fileno()
        if stdout == subprocess.PIPE:
            theirs, out = os.pipe()
            self.stdout = os.fdopen(theirs, "rb")
        self._process: Any = _CONTEXT.Process(
            target=_become, args=(command[3:], (read, out, stderr.fileno()), dict(env), self.open_before)
        )
        self._process.start()
        self.pid = self._process.pid
        os.close(read)
        if stdout == subprocess.PIPE:
            os.close(out)

    def poll(self) -> int | None:
        status: int | None = self._process.exitcode
        return status

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("ftopt", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(arguments: Sequence[str], streams: Sequence[int], env: Mapping[str, str], keep: set[int]) -> None:
    """What ``exec`` would do, as far as it matters."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin = os.fdopen(0, closefd=False)
    for file in _open_files() - keep - {0, 1, 2}:
        try:
            os.close(file)
        except OSError:  # the one that listed them
            continue
    multiprocessing.set_start_method("fork", force=True)  # Python's own default
    os.environ.clear()
    os.environ.update(env)
    sys.exit(main(list(arguments)))
