"""The jobs that this user's commands run on this machine, for `ftopt ps`, `ftopt stop` and `ftopt status`.

Each command keeps a file in a folder of this user (`folder_of_jobs`), and a lock on it for as long as it lives. A file
that nobody has locked is left over from a process that was killed; whoever lists the jobs removes it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

_log = logging.getLogger("ftopt.run")
_STOPPING = ".stopping"
JOIN = "join"
"""The kind of a launch that has joined the job of another."""
NO_JOB_RUNS = "no job of yours runs on this machine"


@dataclass(frozen=True, slots=True)
class LocalJob:
    """One command that serves a job.

    Args:
        kind: the command: ``run``, ``launch``, ``coordinator``, or `JOIN`.
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

    def replicas(self) -> dict[str, int]:
        """The processes of its replicas on this machine, by id, as far as the system shows them (Linux)."""
        found: dict[str, int] = {}
        with suppress(OSError):
            for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii").split():
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    ids = [x.partition(b"=")[2] for x in given if x.startswith(b"FTOPT_REPLICA=")]
                    ids += [after for word, after in pairwise(words) if word == b"--id"]
                    found |= {ids[0].decode(errors="replace"): int(pid)} if ids and b"coordinator" not in words else {}
        return found

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
            for path in (self._path, self._path.with_suffix(_STOPPING)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._path = None


def announce(
    kind: str, name: str, url: str, *, folder: Path | None = None, token_file: Path | None = None
) -> Announcement:
    """Lists a job of this process. If that fails, a warning says so, and the job goes on without."""
    pid = os.getpid()
    given = [None if path is None else str(path.resolve()) for path in (folder, token_file)]
    job = LocalJob(kind, name, url, pid, time.time(), _ticks(pid), *given)
    descriptor = -1
    try:
        parent = folder_of_jobs()
        path = parent / f"{pid}.json"
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # before the file has its name, so that nobody finds it unlocked
        os.write(descriptor, json.dumps(asdict(job)).encode())
        new.replace(path)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        where = error.filename or "the list of jobs"
        _log.warning("%s: %s; `ftopt ps` does not show this job", where, error.strerror)
        return Announcement()
    return Announcement(path, descriptor)


def local_jobs() -> list[LocalJob]:
    """The jobs of this user on this machine, the oldest first."""
    found = []
    for path in sorted(path for folder in folders() for path in _files(folder)):
        with suppress(OSError, ValueError, TypeError):
            job = _read(path)
            found += [job] if job is not None and job.lives() else []
    return sorted(found, key=lambda job: job.began_s)


def is_stopping(job: LocalJob, *, now: bool = False) -> bool:
    """Whether somebody has asked the job to stop before. ``now``: notes that it is asked now."""
    paths = [path.with_suffix(_STOPPING) for folder in folders() for path in _files(folder, f"{job.pid}.json")]
    asked = any(path.exists() for path in paths)
    for path in paths if now else ():
        with suppress(OSError):
            path.touch()
    return asked


def _files(folder: Path, name: str = "*.json") -> list[Path]:
    try:
        return list(folder.glob(name))
    except OSError:
        return []


def _read(path: Path) -> LocalJob | None:
    """The job of a file; None, and the file is removed, if its process has ended."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            job = LocalJob(**json.loads(file.read()))
            texts = (job.kind, job.name, job.url)
            good = all(isinstance(text, str) and text.isprintable() for text in texts)
            return job if good and isinstance(job.pid, int) and isinstance(job.began_s, float) else None
        if os.fstat(descriptor).st_ino == path.stat().st_ino:  # else another process has taken the name meanwhile
            path.unlink(missing_ok=True)
            path.with_suffix(_STOPPING).unlink(missing_ok=True)
    return None


def folders() -> list[Path]:
    """The folders that may list jobs of this user: below ``$XDG_RUNTIME_DIR``, which not every session has, and below
    the temporary folder. Only those that nobody else may write to."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    parents = [runtime / "ftopt"] if runtime.is_absolute() else []
    return [path for path in (*parents, Path(tempfile.gettempdir()) / f"ftopt-{os.getuid()}") if _is_ours(path)]


def folder_of_jobs() -> Path:
    """The first of `folders` that there is or that can be made.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir():
        with suppress(OSError):
            (runtime / "ftopt").mkdir(mode=0o700, exist_ok=True)
    if not folders():
        path = Path(tempfile.gettempdir()) / f"ftopt-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(path):
            raise PermissionError(1, "belongs to another user, or others may write to it", str(path))
    return folders()[0]


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _ticks(pid: int) -> int:
    """When a process started, in clock ticks since the machine's start; 0: it has ended, or the system does not say."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = found.rpartition(")")[2].split()
        return 0 if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0
