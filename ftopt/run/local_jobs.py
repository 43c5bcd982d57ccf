"""The jobs that this user's commands run on this machine, for `ftopt ps`, `ftopt stop` and `ftopt status`.

Each command keeps a file in a folder of this user (`folder_of_jobs`), and a lock on it for as long as it lives. A file
that nobody has locked is left over from a process that was killed; whoever lists the jobs removes it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_log = logging.getLogger("ftopt.run")
NO_JOB_RUNS = "no job of yours runs on this machine"


@dataclass(frozen=True, slots=True)
class LocalJob:
    """One command that serves a job.

    Args:
        kind: the command: ``run``, ``launch`` or ``coordinator``.
        name: its folder's name, or ``coordinator-PORT``.
        url: its coordinator's address.
        pid: its process.
        began_s: when it began, as ``time.time()`` gives it.
        ticks: when its process started, in clock ticks since the machine's start: another process may get its number.
        folder: where it writes; None: nowhere.
        token_file: holds the token that its coordinator asks for; None: it shows the jobs without one, or the user
            has the token.
    """

    kind: str
    name: str
    url: str
    pid: int
    began_s: float
    ticks: int
    folder: str | None = None
    token_file: str | None = None

    def lives(self) -> bool:
        """Whether process ``pid`` is the one that has announced the job."""
        return _ticks(self.pid) == self.ticks


class Announcement:
    """An announced job, until `close`."""

    def __init__(self, path: Path | None = None, descriptor: int = -1) -> None:
        self._path, self._descriptor = path, descriptor

    def close(self) -> None:
        """Removes the job from the list."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._path = None


def announce(
    kind: str, name: str, url: str, *, folder: Path | None = None, token_file: Path | None = None
) -> Announcement:
    """Lists a job of this process. If that fails, a warning says so, and the job goes on without."""
    pid = os.getpid()
    given = [None if path is None else str(path.resolve()) for path in (folder, token_file)]
    job = LocalJob(kind, name, url, pid, time.time(), _ticks(pid), *given)
    try:
        parent = folder_of_jobs(create=True)
        path = parent / f"{pid}.json"
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # before the file has its name, so that nobody finds it unlocked
        os.write(descriptor, json.dumps(asdict(job)).encode())
        new.replace(path)
    except OSError as error:
        _log.warning("%s: %s; `ftopt ps` does not show this job", error.filename, error.strerror)
        return Announcement()
    return Announcement(path, descriptor)


def local_jobs() -> list[LocalJob]:
    """The jobs of this user on this machine, the oldest first."""
    found = []
    try:
        paths = sorted(folder_of_jobs().glob("*.json"))
    except OSError:
        return []
    for path in paths:
        with suppress(OSError, ValueError, TypeError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                job = LocalJob(**json.loads(file.read()))
                found += [job] if job.lives() else []
            else:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda job: job.began_s)


def folder_of_jobs(*, create: bool = False) -> Path:
    """``$XDG_RUNTIME_DIR/ftopt``, else a folder of this user below the temporary one.

    Raises:
        OSError: it cannot be created, or belongs to somebody else.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parent = Path(runtime) if runtime and Path(runtime).is_dir() else Path(tempfile.gettempdir())
    path = parent / ("ftopt" if parent == Path(runtime or "") else f"ftopt-{os.getuid()}")
    if create:
        path.mkdir(mode=0o700, exist_ok=True)
    state = path.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022 or path.is_symlink():
        raise PermissionError(1, "belongs to another user, or others may write to it", str(path))
    return path


def _ticks(pid: int) -> int:
    """When a process started, in clock ticks since the machine's start; 0: it has ended, or the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = stat.rpartition(")")[2].split()
        return 0 if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0
