"""The coordinator's journal: what it decided, in SQLite, on disk before anything is sent (rule JOURNAL).

One file for all jobs of a coordinator. ``synchronous=FULL``: a commit survives the loss of power (0.2 ms on an SSD). A
torn write is SQLite's business: the transaction is there, or it is not.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftopt.errors import UserError
from ftopt.sync.protocol.coordinator import effects as e
from ftopt.sync.protocol.limits import HISTORY

_SCHEMA = """
CREATE TABLE IF NOT EXISTS epoch (job TEXT PRIMARY KEY, epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS roster (job TEXT, replica TEXT, incarnation INTEGER, PRIMARY KEY (job, replica));
CREATE TABLE IF NOT EXISTS gone (job TEXT, replica TEXT, incarnation INTEGER, PRIMARY KEY (job, replica));
CREATE TABLE IF NOT EXISTS decided (
    job TEXT, fragment INTEGER, version INTEGER, attempt INTEGER, digest TEXT, chain TEXT, inner_step INTEGER,
    members TEXT, PRIMARY KEY (job, fragment, version)
);
CREATE TABLE IF NOT EXISTS cursor (job TEXT PRIMARY KEY, unit INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS done (job TEXT, version INTEGER, ranges TEXT, PRIMARY KEY (job, version));
"""


class JournalError(Exception):
    """The journal cannot be written or read now: a full disk, a broken one. The text says so, and what to do."""


class Journal:
    """The journal in ``path``; None keeps it in memory (nothing survives).

    Raises:
        UserError: the file cannot be opened, or is no journal.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(str(path) if path else ":memory:", isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            advice = "give a file that can be written, or one that ftopt has made"
            raise UserError(f"journal {path}: {error}; {advice}") from None

    def load(self, job: str) -> e.JournalState | None:
        """What is known of ``job``, None when it is new.

        Raises:
            JournalError: it cannot be read.
        """
        run = self._db.execute
        try:
            epoch = run("SELECT epoch FROM epoch WHERE job = ?", (job,)).fetchone()
            if epoch is None:
                return None
            roster, gone = (
                tuple(run(f"SELECT replica, incarnation FROM {table} WHERE job = ? ORDER BY replica", (job,)))
                for table in ("roster", "gone")
            )
            decisions = run(
                "SELECT fragment, version, attempt, digest, chain, inner_step, members FROM decided WHERE job = ? "
                "ORDER BY fragment, version",
                (job,),
            )
            done = dict(run("SELECT version, ranges FROM done WHERE job = ?", (job,)))
            cursor = run("SELECT unit FROM cursor WHERE job = ?", (job,)).fetchone()
            decided = []
            for fragment, version, attempt, digest, chain, inner_step, members in decisions:
                ranges, rows = _tuples(done.get(version, "[]") if fragment == 0 else "[]"), _tuples(members)
                decided.append(e.Decided(fragment, version, attempt, digest, chain, inner_step, rows, ranges))
            return e.JournalState(epoch[0], roster, gone, tuple(decided), cursor[0] if cursor is not None else 0)
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self.path} cannot be read ({error}); see to its disk") from None

    def write(self, job: str, entries: Sequence[e.Journalled]) -> None:
        """Writes ``entries`` in one transaction; they are on disk when it returns.

        Raises:
            JournalError: they could not be written. `load` finds none of them, until the process ends at least: then
                all of them may be there if the very last step failed, as after a crash before anything was sent.
        """
        try:
            self._db.execute("BEGIN")
            for entry in entries:
                self._write(job, entry)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:  # some errors have ended it already
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            advice = "make room on its disk, and see that it is sound"
            raise JournalError(f"the journal {self.path} cannot be written ({error}); {advice}") from None

    def _write(self, job: str, entry: e.Journalled) -> None:
        run = self._db.execute
        match entry:
            case e.Epoch(epoch=epoch):
                run("INSERT OR REPLACE INTO epoch VALUES (?, ?)", (job, epoch))
            case e.Known(replica=replica, incarnation=incarnation):
                run("INSERT OR REPLACE INTO roster VALUES (?, ?, ?)", (job, replica, incarnation))
            case e.Gone(replica=replica, incarnation=incarnation):
                run(
                    "INSERT INTO gone VALUES (?, ?, ?) ON CONFLICT (job, replica) "
                    "DO UPDATE SET incarnation = max(incarnation, excluded.incarnation)",
                    (job, replica, incarnation),
                )
            case e.Rollback(fragment=fragment, version=version):
                run("DELETE FROM decided WHERE job = ? AND fragment = ? AND version > ?", (job, fragment, version))
                if fragment == 0:
                    run("DELETE FROM done WHERE job = ? AND version > ?", (job, version))
            case e.Cursor(unit=unit):
                run("INSERT OR REPLACE INTO cursor VALUES (?, ?)", (job, unit))
            case e.Decided(fragment=fragment, version=version):
                oldest = version - HISTORY
                run(
                    "INSERT OR REPLACE INTO decided VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        job, fragment, version, entry.attempt, entry.digest, entry.chain, entry.inner_step,
                        json.dumps(entry.members),
                    ),
                )  # fmt: skip
                run("DELETE FROM decided WHERE job = ? AND fragment = ? AND version <= ?", (job, fragment, oldest))
                if entry.done:
                    run("INSERT OR REPLACE INTO done VALUES (?, ?, ?)", (job, version, json.dumps(entry.done)))
                    run("DELETE FROM done WHERE job = ? AND version <= ?", (job, oldest))

    def size(self) -> int:
        """Bytes of its files, 0 without one."""
        if self.path is None:
            return 0
        files = [Path(f"{self.path}{suffix}") for suffix in ("", "-wal", "-shm")]
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Closes the file."""
        self._db.close()


def _tuples(text: str) -> tuple[Any, ...]:
    return tuple(tuple(row) for row in json.loads(text))
