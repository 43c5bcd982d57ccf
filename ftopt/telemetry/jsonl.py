"""JSON lines that survive a kill: each line is one ``write`` to a file opened for appending.

Several processes append to one file. A line of a killed process is whole or absent. A full disk cuts a line: its writer
begins the next one on a line of its own. Where another process has appended to it meanwhile, readers take that process'
line; they skip what does not parse. Telemetry never stops training: a write that fails is counted and said once.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from ftopt.events import Event

_log = logging.getLogger("ftopt.telemetry")

_BEGIN = b'{"t_s":'
"""Of each line that `JsonLines` writes."""

Line = Mapping[str, Any]
"""One line of a file: a JSON object."""


def significant(number: float) -> float:
    """A number as a line has it: six significant digits are enough, of small numbers too."""
    return float(f"{number:.6g}")


class JsonLines:
    """An append-only file of JSON objects. Any thread.

    Args:
        path: the file; made when it is not there.
        started: the run's start, as ``time.time()`` gives it; every line gets ``t_s``, the seconds since.
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path, started: float, *, clock: Callable[[], float] = time.time) -> None:
        self.lines_lost = 0
        self._cut = False  # the last line that was written has no end
        self._path = path
        self._started = started
        self._clock = clock
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends ``{"t_s": ..., **record}``."""
        line = {"t_s": round(self._clock() - self._started, 4), **record}
        try:
            text = json.dumps(line, separators=(",", ":"), allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(line), separators=(",", ":"))
        whole = b"\n" * self._cut + text.encode() + b"\n"
        try:
            written = os.write(self._fd, whole)
        except OSError as error:
            self._lost(error)
            return
        self._cut = written < len(whole)
        if self._cut:
            self._lost(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _lost(self, error: OSError) -> None:
        self.lines_lost += 1
        if self.lines_lost == 1:
            _log.warning("%s: %s; lines are lost, training goes on", self._path, error)

    def close(self) -> None:
        self._close()


class EventLog:
    """Writes each event of this process to the run's ``events.jsonl``, but for those of every inner step."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def __call__(self, event: Event) -> None:
        if event.event not in ("inner", "stepped"):  # a replica's own file has them, a line a step
            self._lines.write(record_of(event))


def record_of(event: Event) -> dict[str, Any]:
    """An event as a JSON object: its fields, those that are None left out, ``data`` when there is any."""
    record = {field.name: getattr(event, field.name) for field in fields(event)} | {"data": dict(event.data) or None}
    return {name: value for name, value in record.items() if value is not None}


def data_of(line: Line) -> Line:
    """An event line's ``data``; empty when it has none."""
    return cast(Line, line.get("data", {}))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; none when it is not there."""
    return Tail(path).more()


class Tail:
    """Reads what has been appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def more(self) -> list[dict[str, Any]]:
        """The new whole lines, parsed; lines that are not JSON objects are skipped."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [record for line in whole if (record := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    begin = 0
    while begin >= 0:
        try:
            record = json.loads(line[begin:])
        except RecursionError:
            return None
        except ValueError:  # perhaps one that a full disk has cut, and another one behind it
            begin = line.find(_BEGIN, begin + 1)
        else:
            return record if isinstance(record, dict) else None
    return None


def _finite(value: Any) -> Any:
    """``value`` with null for what JSON cannot say (NaN, infinities)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
