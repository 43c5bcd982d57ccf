"""The folder of a replica that `ftopt.run.runner` has not started: its choice, and its first lines.

A replica that comes back continues the folder of its former incarnation: one file of events and one of inner steps,
with all incarnations in turn. Another job gets a folder of its own. The choice is made when the replica has joined: a
folder of the same job that does not have this incarnation yet is continued. Until then nothing is written.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from ftopt.config.loader import dump
from ftopt.config.schema import Recipe
from ftopt.errors import UserError
from ftopt.events import Event, OnEvent, ignore
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import EventLog, JsonLines, Line, Tail, data_of

_logger = logging.getLogger(__name__)


class OwnFolder:
    """Subscribes to a replica's events, and writes them to its folder. Any thread.

    Args:
        recipe: written to the folder.
        replica: this replica's id.
        job: ``URL job``, which identifies a folder of the same job.
        path: the folder; ``-2``, ``-3`` and so on is added when it holds another job.
        opened: called with the folder and the run's start, as ``time.time()`` gives it, before the first line.
        standby: the replica is a spare.

    Raises:
        UserError: no folder can be created at ``path``, or its content cannot be read.

    Attributes:
        files: the folder; before the replica has joined, the newest existing one.
        is_open: whether the replica has joined, and the folder exists.
    """

    def __init__(
        self,
        recipe: Recipe,
        replica: str,
        job: str,
        path: Path,
        opened: Callable[[RunFolder, float], None],
        *,
        standby: bool = False,
    ) -> None:
        self._replica, self._job, self._opened_with, self._base = replica, job, opened, path
        self._standby = {"standby": True} if standby else {}
        self._lock = threading.Lock()
        self._waiting: list[Event] = []
        self._log: OnEvent | None = None
        self.is_open = False
        # Do all slow work now: the network thread waits for events.
        self._recipe = dump(recipe)
        try:
            self._newest = self._find_newest()
            self.files = RunFolder(self._newest or path)
            self._tail = Tail(self.files.events)
            self._told: list[Line] = []
            self._take_up()
            if self._is_of_another_job():  # that job's checkpoints are no fallback for this one
                self.files = RunFolder(next(path for path in self._numbered() if not path.exists()))
        except OSError as error:
            raise UserError(
                f"{path!s:.200} (log.dir and --id, or --folder): {error.strerror}; give a folder that you can read and "
                "write"
            ) from error

    def check(self) -> None:
        """Raises UserError if no folder can be created there. Called before training, when the id is known to be
        good."""
        parent = self._base.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            if not os.access(parent, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise UserError(f"{parent} (log.dir, or --folder): {error.strerror}; give a writable folder") from error

    def __call__(self, event: Event) -> None:
        """Writes the event, once the replica has joined."""
        with self._lock:
            if self._log is None:
                if not event.incarnation:
                    self._waiting.append(event)
                    return
                try:
                    self._log = self._open(event.incarnation)
                    self.is_open = True
                except OSError as error:
                    _logger.warning("%s: %s; training goes on, and nothing is written there", self.files.path, error)
                    self._log = ignore
                for waiting in self._waiting:
                    self._log(waiting)
                self._waiting.clear()
        self._log(event)

    def _open(self, incarnation: int) -> EventLog:
        self._take_up()  # the former process may have written until now
        began = self._began()
        if began is not None and incarnation > max(line["incarnation"] for line in self._told):
            started, dead = began, _dead(self._told)
        else:
            started, dead = time.time(), []
            self.files = RunFolder(self._claimed())
        self._told.clear()
        self.files.create(logs=False)
        self.files.recipe.write_text(self._recipe, encoding="utf-8")
        log = EventLog(JsonLines(self.files.events, started))
        for life in dead:
            log(Event("death", self._replica, life, data={"status": "unknown", "by_fault": False}))
        data = {"pid": os.getpid(), "life": incarnation, "time": time.time(), "job": self._job}
        data |= self._standby
        log(Event("spawn", self._replica, incarnation, data=data))
        self._opened_with(self.files, started)
        return log

    def _take_up(self) -> None:
        """Reads the new lines; keeps those about a start or an end, and the first of each incarnation."""
        lives = {line["incarnation"] for line in self._told}
        for line in self._tail.each():
            if line["event"] in ("spawn", "end", "death") or line["incarnation"] not in lives:
                lives.add(line["incarnation"])
                self._told.append(line)

    def _began(self) -> float | None:
        """When the run of the newest folder began; None if it is not of this job and replica."""
        for line in self._told:
            data = data_of(line)
            if line["event"] == "spawn" and line["replica"] == self._replica and data.get("job") == self._job:
                return float(data["time"]) - float(line["t_s"])
        return None

    def _is_of_another_job(self) -> bool:
        """Compares the job's name only: its coordinator may have another address now."""
        spawns = [data_of(line) for line in self._told if line["event"] == "spawn"]
        names = [str(data["job"]).rpartition(" ")[2] for data in spawns if "job" in data]
        return bool(names) and names[-1] != self._job.rpartition(" ")[2]

    def _find_newest(self) -> Path | None:
        found = None
        for path in self._numbered():
            if not path.exists():
                break
            found = path if (path / "events.jsonl").exists() else found
        return found

    def _claimed(self) -> Path:
        """A folder that no other process writes to, although several may have the same ``path``: it belongs to the one
        that creates the events' file. The first folder may exist without that file."""
        for path in self._numbered():
            if path == self._base or not path.exists():
                path.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    (path / "events.jsonl").open("x").close()
                    return path
        raise AssertionError("numbers do not end")

    def _numbered(self) -> Iterator[Path]:
        yield self._base
        for number in count(2):
            yield self._base.with_name(f"{self._base.name}-{number}")


def _dead(told: Sequence[Line]) -> list[int]:
    """The incarnations that have not reported their end."""
    lives = {line["incarnation"] for line in told if line["incarnation"]}
    return sorted(lives - {line["incarnation"] for line in told if line["event"] in ("end", "death")})
