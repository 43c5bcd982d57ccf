"""A folder's events one after the other; they can be read repeatedly, and none is held for long."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftopt.errors import UserError
from ftopt.watch.jsonl import Line, Piece, data_of, parse, pieces

Say = Callable[[str], None]
"""Reports the progress of a long reading."""

_NOT_NEEDED = re.compile(rb'"event":"(?:gather|payload|reduce\.after|serve|kept)"')
"""Events of every outer step that nothing here uses; most of a long run's lines."""
_MOST = 1e300
"""Upper bound of any number in a run; NaN is not below it either."""
LAST_S = 1e11
MOST_STEPS = 1 << 62
_TELL_EVERY_S = 2.0
_AHEAD = 10_000
"""Maximum distance, in lines, of two that are in the wrong order."""


WRONG = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors raised by a line that somebody has edited."""


@contextmanager
def of_a_run(path: Path) -> Iterator[None]:
    """Raises UserError for a line of the folder ``path`` that no process of ftopt writes."""
    try:
        yield
    except WRONG as error:
        raise UserError(
            f"{path}: its events are not those of an ftopt run ({type(error).__name__}: {error}); "
            "give the folder of a run as `ftopt run` has written it"
        ) from error


class Progress:
    """Says every few seconds how much of some files has been read."""

    def __init__(self, path: Path, size: int, say: Say, *, again: bool = False) -> None:
        self._path, self._size, self._say = path, size, say
        self._what = "read again" if again else "read"
        self._read = 0
        self._told_at = time.monotonic()

    def took(self, count: int) -> None:
        self._read += count
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self._say(f"{self._path}: {self._read / 1e6:.0f} of {self._size / 1e6:.0f} MB {self._what}")


class Written:
    """A file's lines as of now: later lines are in no reading."""

    def __init__(self, path: Path) -> None:
        self._sizes = {each: each.stat().st_size for each in pieces(path)}
        self.size = sum(self._sizes.values())

    def lines(self, progress: Progress, leave: re.Pattern[bytes] | None = None) -> Iterator[dict[str, Any] | None]:
        """The lines; None for one that is no JSON object, such as the last one of a piece if it is cut off."""
        for path, size in self._sizes.items():
            piece = Piece(path)
            try:
                yield from piece.more(size, leave, progress.took)
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}; give a run's folder that you can read") from error
            if piece.rest:
                yield parse(piece.rest)


class Events:
    """The events of one folder in the order of time, the same in each reading. ``skipped``: lines that are no events,
    after the first reading."""

    def __init__(self, folder: Path, path: Path, say: Say) -> None:
        self._folder, self._say = folder, say
        self._written = Written(path)
        self.size = self._written.size
        self.skipped = 0
        self._faultless = False

    def __iter__(self) -> Iterator[Line]:
        return self.read(Progress(self._folder, self.size, self._say, again=True))

    def read(self, progress: Progress) -> Iterator[Line]:
        return in_order(self._valid(progress))

    def _valid(self, progress: Progress) -> Iterator[Line]:
        skipped = 0
        for line in self._written.lines(progress, _NOT_NEEDED):
            if line is not None and (self._faultless or _is_event(line)):
                yield line
            else:
                skipped += 1
        self.skipped, self._faultless = skipped, not skipped  # the next reading of the same lines skips the check


def when(event: Line) -> float:
    return float(event["t_s"])


def in_order(events: Iterable[Line], ahead: int | None = None) -> Iterator[Line]:
    """Sorts events by time; events of the same time stay in the order in which they were written. An event that is more
    than ``ahead`` lines late (because a clock was set) stays late."""
    ahead = _AHEAD if ahead is None else ahead
    waiting: list[Line] = []
    for event in events:
        waiting.append(event)
        if len(waiting) >= 2 * ahead:
            waiting.sort(key=when)
            yield from waiting[:ahead]
            del waiting[:ahead]
    waiting.sort(key=when)
    yield from waiting


class Again:
    """Events that each iteration reads anew."""

    def __init__(self, read: Callable[[], Iterator[Line]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Line]:
        return self._read()


def shifted(parts: Sequence[tuple[Iterable[Line], float]], first_s: float = 0.0) -> Iterator[Line]:
    """The events of several readings in the order of time, after subtracting from each how many seconds it is ahead."""

    def moved(events: Iterable[Line], ahead_s: float) -> Iterator[Line]:
        for event in events:
            yield {**event, "t_s": event["t_s"] - ahead_s - first_s}

    return heapq.merge(*(moved(*part) for part in parts), key=when)


def selected(events: Iterable[Line], job: str | None, begin: int = 0, end: int | None = None) -> Iterator[Line]:
    """The events of one job (None: of all), and of one of its starts; lines that name no job count. ``begin``, ``end``:
    as in `Part`."""
    starts = 0
    for event in events:
        if job is not None and event.get("job", job) != job:
            continue
        starts += event["event"] == "start"
        if end is not None and starts >= end:
            continue  # reads to the end, so that all invalid lines are counted
        if starts >= begin:
            yield event


def _is_event(line: Line) -> bool:
    data = data_of(line)
    return (
        finite(line.get("t_s"))
        and abs(line["t_s"]) < LAST_S
        and isinstance(line.get("event"), str)
        and isinstance(line.get("replica"), str)
        and _is_whole(line.get("incarnation"))
        and isinstance(data, dict)
        and all(_is_whole(line.get(name, 0)) for name in ("fragment", "version", "attempt", "inner_step"))
        and all(finite(data.get(name)) for name in _NUMBERS.get(line["event"], ()))
    )


_NUMBERS = {
    "stall": ("stall_s",),
    "prepare": ("bytes", "seconds", "wire_bytes"),
    "discarded": ("steps",),
    "undone": ("steps",),
    "evaluate": ("loss",),
}
"""Event -> the numbers that its data must have."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and abs(value) < MOST_STEPS


def finite(value: object) -> bool:
    """Whether a value is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
