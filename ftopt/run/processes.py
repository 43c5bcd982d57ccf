"""The child processes of a run: started, watched and ended by their own handles, never by name."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftopt.errors import FtoptError

FTOPT = (sys.executable, "-m", "ftopt")
"""The beginning of ftopt's own command lines."""
_GONE_S = 5.0
_LAST_LINES = 15


class Child:
    """One process. It finishes up when its standard input ends (`ftopt.run.supervised`), which also happens if this
    process is killed.

    Ranks that it starts share its standard input; if it ends without them, they are found by that, since torchrun gives
    each one a session of its own.

    Args:
        name: the replica's id, or ``coordinator``.
        command: its command line.
        log: file to which its standard streams are appended.
        life: number of this process among those of its name.
        env: environment variables for it, unless they are set already.
        own: environment variables for it, also if they are set already.
        reports: whether its standard output is a pipe to this process, which reads its first line.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        life: int,
        env: Mapping[str, str],
        own: Mapping[str, str] | None = None,
        reports: bool = False,
    ) -> None:
        self.name = name
        self.life = life
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if reports else stream,
                stderr=stream,
                env={**env, **os.environ, **(own or {})},
                start_new_session=True,  # the runner passes Ctrl-C on
            )
        assert self.process.stdin is not None
        self._stdin = f"pipe:[{os.fstat(self.process.stdin.fileno()).st_ino}]"

    def reports_now(self, patience_s: float) -> bool:
        """Whether it has reported something, or has ended, within ``patience_s``."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], patience_s)[0])

    def first_line(self) -> str:
        """The first line that it reports; empty if it ended without one. Blocks."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def finish_up(self) -> None:
        """Tells it that the run is over."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def tell(self, line: str) -> None:
        """Writes a line to it, which it reads with `ftopt.run.supervised.finish_up`."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended
            os.write(self.process.stdin.fileno(), f"{line}\n".encode())

    def terminate(self) -> None:
        """Asks it to leave in good order, even if it is stopped."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.process.send_signal(number)

    def end(self, patience_s: float) -> None:
        """Waits for its end, and after ``patience_s`` kills it with all its ranks."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._end_ranks()
        self.finish_up()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _end_ranks(self) -> None:
        deadline = time.monotonic() + _GONE_S
        while (left := _with_stdin(self._stdin)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def complained(self) -> str:
        """Its messages, each once: its ranks write the same ones."""
        messages = re.split(r"^ftopt: ", self.said(), flags=re.MULTILINE)
        return "\n".join(dict.fromkeys(message.strip() for message in messages if message.strip()))

    def last_lines(self) -> str:
        """A text that it has ended, with the last lines that it wrote."""
        said = self.said().splitlines()[-_LAST_LINES:]
        return "\n".join([f"{self.name} ended; the last lines that it wrote:", *(f"  {line}" for line in said)])

    def said(self, *, at_most: int | None = None) -> str:
        """The last ``at_most`` bytes of its output on the standard streams; empty if somebody has removed the file."""
        try:
            with self._log.open("rb") as stream:
                start = 0 if at_most is None else stream.seek(0, os.SEEK_END) - at_most
                stream.seek(max(start, self._log_start))
                return stream.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""


def _with_stdin(pipe: str) -> list[int]:
    """The processes whose standard input is ``pipe``; none without ``/proc``, where ranks notice by themselves that
    their launcher is gone."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if str((entry / "fd" / "0").readlink()) == pipe:
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def describe_exit(status: int) -> str:
    """An exit status in words: ``SIGKILL``, ``exit status 1``."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


class RunFailed(FtoptError):
    """The run did not reach its end. Exit status 1.

    Attributes:
        summary: the run's figures so far.
        checkpoint: the newest complete checkpoint; None if there is none.
    """

    summary: dict[str, Any] | None = None
    checkpoint: Path | None = None


class Interrupted(RunFailed):
    """A signal has ended the run. Exit status 128 + ``number``."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
