"""A human-readable trace of a coordinator's decisions: each input, and the machine's effects.

One line per input, `<`, and below it one per effect: `>` a message to a replica, `#` an entry of the journal, `!` an
event. `=` shows what a fragment's round waits for, whenever that changes:

    12:26:31.123 toy  < r0 Propose(contribution=Contribution(fragment=0, version=3, steps=50, last_step=200, ...))
    12:26:31.123 toy    > r1 CallIn(fragment=0, version=4)
    12:26:31.123 toy    ! call_in r1 fragment 0 version 4
    12:26:31.123 toy    = fragment 0: 1 of 2 have proposed; it waits for r1

Heartbeats and timer inputs that cause nothing are left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from ftopt.common.printable import printable
from ftopt.errors import UserError
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.server.under_way import under_way

_log = logging.getLogger(__name__)
_MAX_CHARS = 400
"""The most characters of a message that are shown: a hello may hold thousands of names."""


class Trace:
    """Appends the trace of all jobs of a coordinator to one file.

    A failed write ends the trace with a warning; the jobs go on.

    Args:
        path: the file; its folder must exist.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[tuple[str, int], str] = {}
        self._rounds: dict[tuple[str, int], str] = {}
        try:
            self._file: BinaryIO | None = path.open("ab", buffering=0)  # complete up to the last line, whatever happens
        except OSError as error:
            raise UserError(f"--trace {path}: {error.strerror}; give a file that can be written to") from error

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def step(
        self,
        job: str,
        machine: Coordinator,
        conn: int,
        cause: m.FromReplica | str,
        effects: e.Effects,
    ) -> None:
        """Writes an input of a job's machine, and its effects.

        ``conn``: the connection of the input; 0: none. ``cause``: the message, or the name of another input.
        """
        if self._file is None:
            return
        if isinstance(cause, m.Hello):
            self._names[job, conn] = cause.replica
        who = self._names.get((job, conn), f"connection {conn}") if conn else ""
        if isinstance(cause, str):
            self._names.pop((job, conn), None)
        lines = [*(self._effect(job, effect) for effect in effects), *self._changed(job, machine)]
        quiet = not conn or isinstance(cause, m.Heartbeat)
        if lines or not quiet:
            shown = cause if isinstance(cause, str) else _text(cause)
            self._write(job, [f"< {who} {shown}" if who else f"< {shown}", *(f"  {line}" for line in lines)])

    def _effect(self, job: str, effect: e.CoordinatorEffect) -> str:
        match effect:
            case e.SendTo(conn=conn, message=message):
                who = self._names.get((job, conn), f"connection {conn}")
                return f"> {who} {_text(message)}"
            case e.Close(conn=conn):
                who = self._names.pop((job, conn), f"connection {conn}")
                return f"> {who} (closed)"
            case e.Emit(event=event, replica=replica, data=data):
                at = ((name, getattr(effect, name)) for name in ("fragment", "version", "attempt"))
                where = "".join(f" {name} {value}" for name, value in at if value is not None)
                return f"! {event} {replica}{where}{_short(data)}"
        return f"# {_text(effect)}"

    def _changed(self, job: str, machine: Coordinator) -> list[str]:
        """Lines on what rounds are doing, where that has changed."""
        changed = []
        for r in machine.rounds if machine.running else ():
            doing = under_way(r, machine.roster)["doing"]
            known, self._rounds[job, r.fragment] = self._rounds.get((job, r.fragment)), doing
            if doing != known:
                changed.append(f"= fragment {r.fragment}: {doing}")
        return changed

    def _write(self, job: str, lines: list[str]) -> None:
        assert self._file is not None
        head = f"{datetime.fromtimestamp(time.time()).strftime('%H:%M:%S.%f')[:-3]} {job}"
        try:
            self._file.write("".join(f"{head} {printable(line, _MAX_CHARS)}\n" for line in lines).encode())
        except OSError as error:
            _log.warning("the trace %s ends: %s", self._path, error.strerror)
            self.close()


def _text(what: Any) -> str:
    """A message as a constructor call, without fields that have their default values."""
    if is_dataclass(what):
        shown = ((f.name, getattr(what, f.name)) for f in fields(what) if getattr(what, f.name) != _default(f))
        return f"{type(what).__name__}({', '.join(f'{name}={_text(value)}' for name, value in shown)})"
    if isinstance(what, tuple | list):
        return f"[{', '.join(map(_text, what))}]"
    return repr(what)


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _short(data: Mapping[str, Any]) -> str:
    return "".join(f" {name}={value!r}" for name, value in data.items())
