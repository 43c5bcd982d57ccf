"""The child processes of a run: started, watched and ended by their own handles, never by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class Child:
    """One process. It finishes up when its standard input ends (`ftopt.job.supervised`), also if this one is killed.

    Args:
        name: the replica's id, or ``coordinator``.
        arguments: of ``python -m ftopt``.
        log: file that its standard streams are appended to.
        life: how many-th process of that name.
        env: environment variables set for it unless they are set already.
        reports: whether its standard output is a pipe to here, to read its first line from.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        life: int,
        env: Mapping[str, str],
        reports: bool = False,
    ) -> None:
        self.name = name
        self.life = life
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ftopt", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if reports else stream,
                stderr=stream,
                env={**env, **os.environ},
                start_new_session=True,  # Ctrl-C is the runner's to hand on.
            )

    def first_line(self) -> str:
        """The first line that it reports; empty when it ended without one. Blocking."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def finish_up(self) -> None:
        """Tells it that the run is over."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def terminate(self) -> None:
        """Asks it to leave in good order, also if it is stopped."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.process.send_signal(number)

    def end(self, patience_s: float) -> None:
        """Waits for its end, and kills it after ``patience_s``."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.finish_up()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def said(self) -> str:
        """What it wrote to its standard streams."""
        with self._log.open("rb") as stream:
            stream.seek(self._log_start)
            return stream.read().decode(errors="replace").strip()


def describe_exit(status: int) -> str:
    """An exit status in words: ``SIGKILL``, ``exit status 1``."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
