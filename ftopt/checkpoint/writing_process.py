"""Finds a second process that writes the same replica's checkpoints of the same job: the job goes on twice.

Each process leaves a *mark* in the folder, one file for each replica and start of the job. A killed process leaves its
mark behind, so another's mark counts in two cases alone: its process lives on this host when this one resumes; or it
has replaced this one's mark twice. Once is honest: a process that was replaced while it hung finishes its last write.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from ftopt.checkpoint.manifest import BadCheckpoint, read_json
from ftopt.checkpoint.part import stem_of
from ftopt.common.paths import replace_text
from ftopt.sync.protocol.limits import Number
from ftopt.sync.protocol.wire import MessageError, from_plain

_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class WritingProcess:
    """A process. ``started``: what no later process with this number has; "" where the system does not tell."""

    host: str
    pid: Number
    started: str
    since: str

    def is_other(self, own: WritingProcess) -> bool:
        return (self.host, self.pid, self.started) != (own.host, own.pid, own.started)

    def lives(self, host: str) -> bool:
        """Whether it is known to live, as only processes of this ``host`` are."""
        return host == self.host and self.started != "" and _started(self.pid) == self.started


def _started(pid: int) -> str:
    """The boot and the clock tick of a process's start; "" if it does not live, or the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return "" if state in (b"Z", b"X") else f"{boot} {int(fields[18])}"
    except (OSError, ValueError, IndexError):
        return ""


class Mark:
    """The mark of this process as the writer of a replica's checkpoints."""

    def __init__(self, replica: str) -> None:
        self._stem = stem_of(replica)
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        self._own = WritingProcess(socket.gethostname(), os.getpid(), _started(os.getpid()), now)
        self._path: Path | None = None  # of the mark that it has left
        self._removed, self._lock = False, threading.Lock()  # the writer's thread leaves it, training removes it
        self._seen: Counter[WritingProcess] = Counter()  # others that have replaced it

    def living(self, folder: Path, start: str) -> WritingProcess | None:
        """The other process that writes this replica's checkpoints of that start of the job, and is known to live."""
        there = _read(self._at(folder, start))
        if there is None or not (there.is_other(self._own) and there.lives(self._own.host)):
            return None
        self._seen[there] = 2
        return there

    def leave(self, folder: Path, start: str) -> WritingProcess | None:
        """Leaves the mark until `remove`; returns another process when its mark has replaced this one for the second
        time."""
        with self._lock:
            return self._leave(self._at(folder, start))

    def _leave(self, path: Path) -> WritingProcess | None:
        other: WritingProcess | None = None
        if self._removed:  # the last checkpoint is written after leaving
            return None
        if (there := _read(path)) is not None and not there.is_other(self._own):
            self._path = path
            return None
        if there is not None and path == self._path:
            self._seen[there] += 1
            other = there if self._seen[there] == 2 else None
        with suppress(OSError):
            replace_text(path, json.dumps(asdict(self._own)))
            before, self._path = self._path, path
            if before is not None and before != path:  # the job has begun anew, and is another one
                before.unlink(missing_ok=True)
        return other

    def remove(self) -> None:
        with self._lock:
            path, self._path, self._removed = self._path, None, True
            if path is not None and (there := _read(path)) is not None and not there.is_other(self._own):
                with suppress(OSError):
                    path.unlink()

    def _at(self, folder: Path, start: str) -> Path:
        return folder / f".{self._stem}-{start}.writer"


def _read(path: Path) -> WritingProcess | None:
    """The process that has left a mark; None: there is no mark, or no valid one."""
    with suppress(BadCheckpoint, MessageError):
        return from_plain(WritingProcess, read_json(path, _MAX_BYTES))
    return None
