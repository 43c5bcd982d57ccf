"""The coordinator's journal: its decisions, on disk before anything is sent (rule JOURNAL).

One append-only file for all jobs of a coordinator. Each `Journal.write` appends one row (`ftopt.sync.server.rows`), so
that either all of its entries are in the file or none. Now and then the file is rewritten, without obsolete entries. A
row is on the disk when `write` returns, or when the future of `submit` is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ftopt.common.paths import new_file
from ftopt.errors import UserError
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.protocol.limits import HISTORY
from ftopt.sync.protocol.wire import MessageError, from_plain, parse, plain
from ftopt.sync.server import rows

_log = logging.getLogger(__name__)
_HEADING = b'"ftopt journal 1"'
_FIRST, _ = rows.encode(b"", _HEADING)
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        e.Epoch,
        e.Known,
        e.Gone,
        e.Forgotten,
        e.Standby,
        e.Replaced,
        e.Finished,
        e.LeftEarly,
        e.Rollback,
        e.Cursor,
        e.Decided,
        m.JobFailed,
    )
}
_MANY = 4 * HISTORY
_ROOM_BYTES = 256 << 10
"""Free bytes that the disk must have; a round of a thousand replicas takes 100 KiB."""
_LARGE_BYTES = 4 << 20
"""A smaller file is never rewritten; a larger one is when it is four times as large as after the last rewrite."""


class JournalError(Exception):
    """The journal cannot be written now, as on a full or broken disk. The text says why, and what to do."""


class Journal:
    """The journal in ``path``; None keeps it in memory (nothing survives). One process at a time may have it open.

    Raises:
        UserError: the file cannot be opened, is no journal, is damaged, or is another coordinator's.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._entries: dict[str, list[e.Journalled]] = {}
        self._fold_at: dict[str, int] = {}
        self._fd = -1
        self._end = self._anew_from = 0
        self._last = b""
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._submitted: dict[str, Future[None]] = {}
        """Job -> its last write on the writing thread."""
        self._failed: set[str] = set()
        """Jobs of which a write has failed on that thread: their later writes are not written."""
        self._cut = self._moved = False
        """A part of a row follows `_end`; the file was moved here and its name is not synced yet."""
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists() and not path.is_file():  # a pipe or a device may be read for ever
                    raise UserError(f"journal {path}: it is no regular file; give a file that can be written")
                self._fd = _locked(path)
                self._read(path)
            except OSError as error:
                self.close()
                raise UserError(f"journal {path}: {error.strerror or error}; give a file that can be written") from None
            except BaseException:
                self.close()
                raise

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        try:
            found = rows.decode(data)
        except rows.Damaged as error:
            raise UserError(_damaged(path, data, str(error))) from None
        if not found.bodies and not _FIRST.startswith(data.rstrip(b"\0")):
            raise UserError(_damaged(path, data, "it ends in its first row"))
        self._end, self._last, self._cut = found.end, found.last, found.end < len(data)
        if not found.bodies:
            if data:
                _log.warning("journal %s has no whole row in its %d bytes; it begins anew", path, len(data))
            self._append(_HEADING)
            _sync_folder(path)
        try:
            for body in found.bodies:
                if body is found.bodies[0] and body != _HEADING:
                    raise MessageError(f"it begins with {body[:40]!r}")
                if body is not found.bodies[0]:
                    self._remember(*_parsed(body))
        except (MessageError, UnicodeDecodeError) as error:
            wrong = f"journal {path} is of another version of ftopt ({error}); run that version, or give another file"
            raise UserError(wrong) from None
        self._anew_from = max(_LARGE_BYTES, self._end)

    def _remember(self, job: str, entries: Sequence[e.Journalled]) -> None:
        """Keeps what `load` needs of the entries; if there are none, forgets the job."""
        if not entries:
            self._entries.pop(job, None)
            self._fold_at.pop(job, None)
            return
        known = self._entries.setdefault(job, [])
        known.extend(entries)
        if len(known) >= self._fold_at.get(job, _MANY):
            known[:] = e.needed(e.replay(known))
            self._fold_at[job] = max(_MANY, 2 * len(known))

    def jobs(self) -> list[str]:
        """The known jobs, in the order of their first entries."""
        return list(self._entries)

    def load(self, job: str) -> e.JournalState | None:
        """The state of ``job``; None when it is new. Waits for its submitted entries. Forgets a failed write: entries
        submitted from now on are written."""
        if (last := self._submitted.pop(job, None)) is not None:
            wait([last])
        self._failed.discard(job)
        entries = self._entries.get(job)
        return e.replay(entries) if entries else None

    def forget_replicas(self, job: str) -> None:
        """Forgets the replicas of ``job`` and keeps its last decisions. Raises as `write` does."""
        saved = self.load(job)
        last = {d.fragment: d for d in saved.decided} if saved is not None else {}
        self.write(job, ())
        if last:
            self.write(job, list(last.values()))

    def submit(self, job: str, entries: Sequence[e.Journalled]) -> asyncio.Future[None] | None:
        """Writes ``entries`` on another thread, after all submitted before; called in an event loop.

        Returns:
            A future that is done when they are on the disk. Its exception is a `JournalError` if they, or others of
            the job submitted since the last `load`, could not be written. None without a file: they are kept already.
        """
        if self.path is None:
            self.write(job, entries)
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ftopt-journal")
        future = self._thread.submit(self._write_submitted, job, entries)
        self._submitted[job] = future
        return asyncio.wrap_future(future)

    def _write_submitted(self, job: str, entries: Sequence[e.Journalled]) -> None:
        if job in self._failed:
            raise JournalError("what was decided before could not be written")
        try:
            self.write(job, entries)
        except BaseException:
            self._failed.add(job)
            raise

    def check_room(self) -> None:
        """Raises `JournalError` if the disk has less than `_ROOM_BYTES` free."""
        if self.path is None:
            return
        disk = os.fstatvfs(self._fd)
        free = (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize  # root may use reserved blocks
        if disk.f_blocks and free < _ROOM_BYTES:
            raise JournalError(
                f"the disk of the journal {self.path} has {free >> 10} KiB of room, and {_ROOM_BYTES >> 10} KiB are "
                "needed to go on; make room on it"
            )

    def write(self, job: str, entries: Sequence[e.Journalled]) -> None:
        """Writes ``entries``; they are on disk when it returns. A row without entries says that the job is forgotten.

        Raises:
            JournalError: they could not be written, and `load` finds none of them. The file may have all of them if
                the very last step failed, as after a crash before anything was sent.
        """
        with self._lock:
            self._write(job, entries)

    def _write(self, job: str, entries: Sequence[e.Journalled]) -> None:
        if self.path is not None:
            try:
                if lost := self._lost(self.path):
                    _log.warning("journal %s %s while this coordinator runs; it is written anew", self.path, lost)
                    self._write_anew(self.path)
                elif self._end > self._anew_from:
                    self._shrink(self.path)
                if self._moved:
                    _sync_folder(self.path)
                    self._moved = False
                self._append(_body(job, entries))
            except BlockingIOError as error:
                advice = "end one of the two, and give each a file of its own"
                raise JournalError(f"the journal {self.path} cannot be written ({error.strerror}); {advice}") from None
            except OSError as error:
                advice = "make room on its disk, and see that it is sound"
                wrong = f"the journal {self.path} cannot be written ({error.strerror or error}); {advice}"
                raise JournalError(wrong) from None
        self._remember(job, entries)

    def _append(self, body: bytes) -> None:
        if self._cut:
            os.ftruncate(self._fd, self._end)
        row, last = rows.encode(self._last, body)
        self._cut = True
        try:
            _write_all(self._fd, row, self._end)
            os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._cut = False
        self._end, self._last = self._end + len(row), last

    def _lost(self, path: Path) -> str:
        """What somebody else has done to the file; "": nothing. Takes a few microseconds, far less than a sync."""
        own = os.fstat(self._fd)
        try:
            there = path.stat()
        except FileNotFoundError:
            return "was deleted or moved"
        if not os.path.samestat(own, there):
            return "was replaced by another file"
        if self._cut:
            return ""
        return "" if own.st_size == self._end else f"was changed to {own.st_size} bytes, {self._end} were written,"

    def _shrink(self, path: Path) -> None:
        """Rewrites the file if it has grown large; if that fails, it grows on."""
        try:
            self._write_anew(path)
        except OSError:
            self._anew_from = 2 * self._end

    def _write_anew(self, path: Path) -> None:
        """Replaces the file by one with only the entries still needed. On an OSError the old file stays."""
        needed = {job: e.needed(e.replay(entries)) for job, entries in self._entries.items()}
        bodies = [_HEADING, *(_body(job, entries) for job, entries in needed.items())]
        data, last = b"", b""
        for body in bodies:
            row, last = rows.encode(last, body)
            data += row
        path = path.resolve()  # replaces the file, not a link to it
        new = path.with_name(f".{path.name}.{os.getpid()}.draft")
        fd = new_file(new)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(fd, os.fstat(self._fd).st_mode & 0o777)
            _write_all(fd, data, 0)
            os.fsync(fd)
            _refuse_if_locked(path, self._fd)
            new.replace(path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        os.close(self._fd)
        self._fd, self._end, self._last, self._cut, self._moved = fd, len(data), last, False, True
        self._entries = needed
        self._anew_from = max(_LARGE_BYTES, 4 * self._end)

    def size(self) -> int:
        """Bytes of the file; 0 without one."""
        return self._end

    def close(self) -> None:
        """Closes the file, after all submitted entries are written."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _locked(path: Path) -> int:
    """Opens the file, which is created if missing, and locks it; returns its descriptor."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            advice = "end that one, or give this one a file of its own"
            raise UserError(f"journal {path} is in use by another coordinator; {advice}") from None
        except FileNotFoundError:
            pass
        except OSError:
            os.close(fd)
            raise
        os.close(fd)  # another file has replaced it meanwhile


def _refuse_if_locked(path: Path, own: int) -> None:
    """Raises BlockingIOError if the file is not ``own``, but another coordinator's journal."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.samestat(os.fstat(fd), os.fstat(own)):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, "another coordinator has its journal there now") from None
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _sync_folder(path: Path) -> None:
    """Syncs the file's name to the disk, too."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _body(job: str, entries: Sequence[e.Journalled]) -> bytes:
    return json.dumps([job, [[type(entry).__name__, plain(entry)] for entry in entries]], allow_nan=False).encode()


def _parsed(body: bytes) -> tuple[str, list[e.Journalled]]:
    match parse(body.decode()):
        case [str(job), [*entries]]:
            return job, [_entry(entry) for entry in entries]
    raise MessageError(f"row {body[:40]!r}")


def _entry(entry: object) -> e.Journalled:
    match entry:
        case [str(kind), value] if kind in _KINDS:
            found: e.Journalled = from_plain(_KINDS[kind], value)
            return found
        case [str(kind), _]:
            raise MessageError(f"unknown entry {kind!r}")
    raise MessageError(f"row entry {str(entry)[:40]}")


def _damaged(path: Path, data: bytes, where: str) -> str:
    if not data.startswith(_FIRST[:8]) and b"ftopt journal" not in data[: len(_FIRST)]:
        return f"journal {path} is no journal of this version of ftopt; give a file that it has made, or a new one"
    return (
        f"journal {path} is damaged: {where}. Nothing has been changed. Put an older copy of it in its place: the "
        "replicas that live tell what came later. Or move it away and start without it: they tell all that they hold, "
        "if they are back within policy.recovery_s"
    )
