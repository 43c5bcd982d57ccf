"""JSON lines that survive a kill: each line is one ``write`` to a file opened for appending.

Several processes append to one file. A line of a killed process is whole or absent. A full disk cuts a line off: its
writer puts its next line on a new line. If another process has appended to the cut line meanwhile, readers take that
process' line; they skip what does not parse. Telemetry never stops training: a failed write is counted and warned of
once.

A full file continues in the next piece: ``events.jsonl``, ``events.jsonl.000002`` and so on. No piece is renamed,
changed or removed, so a process that dies leaves nothing half done. Writers need no agreement: before each line, each
of them looks whether its piece is full, and if so appends to the next one; the first to do so creates it. Since a full
piece stays full, a line that a process writes after it has heard of another process' line is never in an earlier piece
than that line.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from ftopt.events import Event

_log = logging.getLogger("ftopt.watch")

_BEGIN = b'{"t_s":'
"""The beginning of each line that `JsonLines` writes."""

PIECE_BYTES = 64 << 20
"""Size at which a piece is full. Each writer that was about to append may still add one line."""
_DIGITS = 6
_BLOCK_BYTES = 1 << 18

Line = Mapping[str, Any]
"""One line of a file: a JSON object."""


def significant(number: float) -> float:
    """A number rounded to the six significant digits of a line; small numbers keep six, too."""
    return float(f"{number:.6g}")


def piece(path: Path, number: int) -> Path:
    """The piece of a file with this number; the first one has the file's own name."""
    return path if number == 1 else path.with_name(f"{path.name}.{number:0{_DIGITS}}")


def numbers(path: Path) -> list[int]:
    """The numbers of the pieces that exist, in order."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except FileNotFoundError:
        return []
    ends = (name.removeprefix(path.name) for name in names if name.startswith(path.name))
    found = (1 if not end else int(end[1:]) for end in ends if not end or _is_number(end))
    return sorted(found)


def pieces(path: Path) -> list[Path]:
    """The pieces of a file that exist, in order."""
    return [piece(path, number) for number in numbers(path)]


def _is_number(end: str) -> bool:
    digits = end[1:]
    return end[0] == "." and len(digits) >= _DIGITS and digits.isascii() and digits.isdecimal() and int(digits) > 1


class JsonLines:
    """An append-only file of JSON objects, in pieces. Usable from any thread.

    Args:
        path: the file; created if it does not exist.
        started: the run's start, as ``time.time()`` gives it; every line gets ``t_s``, the seconds since.
    """

    def __init__(
        self,
        path: Path,
        started: float,
        *,
        clock: Callable[[], float] = time.time,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.lines_lost = 0
        self._cut = False  # the last line written was cut off
        self._path = path
        self._started = started
        self._clock = clock
        self._piece_bytes = piece_bytes
        self._stuck = False
        self._number = max(numbers(path), default=1)
        self._fd = _open(path, self._number)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends ``{"t_s": ..., **record}``."""
        line = {"t_s": round(self._clock() - self._started, 4), **record}
        try:
            text = json.dumps(line, separators=(",", ":"), allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(line), separators=(",", ":"))
        try:
            self._go_on()
            whole = b"\n" * self._cut + text.encode() + b"\n"
            written = os.write(self._fd, whole)
        except OSError as error:
            self._lost(error)
            return
        self._cut = written < len(whole)
        if self._cut:
            self._lost(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _go_on(self) -> None:
        """Turns to the next piece if this one is full. If that cannot be opened, stays here, so that no line is
        lost."""
        while True:
            number = self._number  # read first: if another thread turns to the next piece, the size is of that
            if os.fstat(self._fd).st_size < self._piece_bytes:
                return
            try:
                following = _open(self._path, number + 1)
            except OSError as error:
                if not self._stuck:
                    self._stuck = True
                    _log.warning("%s: %s; lines go on in the piece before, which is full", error.filename, error)
                return
            try:
                os.dup2(following, self._fd, inheritable=False)  # other threads may be about to write to it
            finally:
                os.close(following)
            self._number, self._cut, self._stuck = number + 1, False, False

    def _lost(self, error: OSError) -> None:
        self.lines_lost += 1
        if self.lines_lost == 1:
            _log.warning("%s: %s; lines are lost, training goes on", self._path, error)

    def close(self) -> None:
        self._close()


def _open(path: Path, number: int) -> int:
    """A descriptor that appends to a piece. Where others can write to the folder, they may have put something else in
    place of the next piece: links are not followed, and only a plain file is accepted."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    if number == 1:
        return os.open(path, flags, 0o644)
    at = piece(path, number)
    descriptor = os.open(at, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EEXIST, "not a plain file", str(at))
    return descriptor


class EventLog:
    """Writes each event of this process to the run's ``events.jsonl``, except those of every inner step."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def __call__(self, event: Event) -> None:
        if event.event not in ("inner", "stepped"):  # a replica's own file has these, one line per step
            self._lines.write(record_of(event))


def record_of(event: Event) -> dict[str, Any]:
    """An event as a JSON object: its fields that are not None, and ``data`` if there is any."""
    record = {field.name: getattr(event, field.name) for field in fields(event)} | {"data": dict(event.data) or None}
    return {name: value for name, value in record.items() if value is not None}


def data_of(line: Line) -> Line:
    """An event line's ``data``; empty when it has none."""
    return cast(Line, line.get("data", {}))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file, from all its pieces; none if it does not exist."""
    return Tail(path).more()


class Tail:
    """Reads what has been appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces: dict[int, Piece] = {}

    def more(self) -> list[dict[str, Any]]:
        """The new whole lines, parsed; lines that are not JSON objects are skipped."""
        return list(self.each())

    def each(self) -> Iterator[dict[str, Any]]:
        """The lines of `more`, one after the other; lines that were taken are not read again."""
        new = [max(self._pieces) + 1] if self._pieces else numbers(self._path)
        while new and (path := piece(self._path, new[0])).exists():
            self._pieces[new[0]] = Piece(path)
            new = new[1:] or [new[0] + 1]
        # The newest first: then the parts that are read of older pieces contain all that its lines depend on.
        sizes = {number: each.size() for number, each in reversed(self._pieces.items())}
        for number, each in self._pieces.items():  # all: a writer that was stopped may append to an older, full piece
            yield from (line for line in each.more(sizes[number]) if line is not None)


class Piece:
    """How much of a piece has been read. ``rest``: the beginning of a line whose end is not there yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self.rest = path, 0, b""

    def size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def more(
        self, size: int, leave: re.Pattern[bytes] | None = None, took: Callable[[int], None] = lambda count: None
    ) -> Iterator[dict[str, Any] | None]:
        """The new lines of its first ``size`` bytes; None for one that is no JSON object. Lines that match ``leave``
        are left out; ``took`` is called with the numbers of bytes read."""
        if size <= self._offset:
            return
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            while data := file.read(min(_BLOCK_BYTES, size - self._offset)):
                self._offset += len(data)
                took(len(data))
                *lines, self.rest = (self.rest + data).split(b"\n")
                yield from _parsed([line for line in lines if leave is None or not leave.search(line)])


def _parsed(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """All at once if all are valid, which is three times as fast."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
        if len(values) == len(lines):
            return [value if isinstance(value, dict) else None for value in values]
    except (ValueError, RecursionError):
        pass
    return [parse(line) for line in lines]


def parse(line: bytes) -> dict[str, Any] | None:
    """A line's object; None if it has none."""
    begin = 0
    while begin >= 0:
        try:
            record = json.loads(line[begin:])
        except RecursionError:
            return None
        except ValueError:  # perhaps a line that a full disk has cut off, followed by another one
            begin = line.find(_BEGIN, begin + 1)
        else:
            return record if isinstance(record, dict) else None
    return None


def _finite(value: Any) -> Any:
    """``value`` with null for numbers that JSON does not have (NaN, infinities)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
