"""Traces of which machines are there at each time: preemptions from files, and generators of failures.

Three formats are read. `Bamboo's <https://github.com/uclasystem/bamboo>`_, which Oobleck uses too, has lines
``milliseconds,add|remove,node``; samples of a fleet's size have lines ``date, time, machines``.
"""

from __future__ import annotations

import csv
import math
import random
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ftopt.common import plural
from ftopt.common.paths import user_path
from ftopt.errors import UserError

ADD, REMOVE = "add", "remove"
MOST = 5_000_000
"""Maximum changes of a trace: more would fill the memory before the first result."""
MOST_BYTES = 50 * MOST
"""Maximum size of a file, for the same reason; a change takes some 20 bytes."""
_SHOWN = 100
"""Characters shown of a wrong line."""


@dataclass(frozen=True, slots=True)
class Change:
    """At ``at_s`` seconds a machine is added or removed; ``told``: with the model's notice."""

    at_s: float
    kind: str
    node: str
    told: bool = True


@dataclass(frozen=True, slots=True)
class Stay:
    """A machine from its addition until it is removed (``removed``) or the trace ends. ``told``: the removal has a
    notice."""

    node: str
    start_s: float
    stop_s: float
    removed: bool
    told: bool = True


@dataclass(frozen=True, slots=True)
class Trace:
    """The machines that are there, from 0 to ``end_s`` seconds. ``changes`` are in order of time."""

    name: str
    changes: tuple[Change, ...]
    end_s: float

    def stays(self) -> list[Stay]:
        """The stays in the order of their starts."""
        since: dict[str, float] = {}
        found: list[Stay] = []
        for change in self.changes:
            if change.kind == ADD:
                since[change.node] = change.at_s
            else:
                found.append(Stay(change.node, since.pop(change.node), change.at_s, True, change.told))
        found += [Stay(node, start_s, self.end_s, False) for node, start_s in since.items()]
        return sorted(found, key=lambda x: (x.start_s, x.node))

    def machine_seconds(self) -> float:
        """The time of all machines together."""
        return math.fsum(x.stop_s - x.start_s for x in self.stays())

    def removals(self) -> list[tuple[float, int]]:
        """The times at which machines are removed, and how many."""
        found: dict[float, int] = {}
        for change in self.changes:
            if change.kind == REMOVE:
                found[change.at_s] = found.get(change.at_s, 0) + 1
        return sorted(found.items())

    def sizes(self) -> list[tuple[float, int]]:
        """(seconds, machines from then on)."""
        found: list[tuple[float, int]] = []
        count = 0
        for change in self.changes:
            count += 1 if change.kind == ADD else -1
            if found and found[-1][0] == change.at_s:
                found.pop()
            found.append((change.at_s, count))
        return found

    def cut(self, end_s: float) -> Trace:
        """The changes before ``end_s``."""
        return Trace(self.name, tuple(x for x in self.changes if x.at_s < end_s), end_s)


def read(path: str | Path, *, seed: int = 0) -> Trace:
    """Reads a trace.

    Args:
        path: the file; its first line shows the format.
        seed: draws which machines are removed, for a file with only their number.

    Raises:
        UserError: there is no such file, it is no regular file or too large, or a line is wrong.
    """
    path = user_path(path)
    try:
        _check_file(path)
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # spreadsheets begin a file with a mark
        rows = [(number, row) for number, row in enumerate(csv.reader(lines), 1) if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}; name a trace with lines `ms,add|remove,node`") from None
    if not rows:
        raise UserError(f"{path} is empty; a trace has lines `ms,add|remove,node` or `date, time, machines`")
    dated = re.match(r"\s*\d+-", rows[0][1][0])
    changes, end_s = _sizes(path, rows, seed) if dated else _changes(path, rows)
    if end_s <= 0:
        raise UserError(f"{path} has nothing after its first moment; a trace needs a later line to end with")
    return Trace(path.stem, tuple(changes), end_s)


def _check_file(path: Path) -> None:
    """UserError if it may never end (a pipe, a device), or is too large. A folder gets the system's message."""
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise UserError(f"{path} is a pipe or a device; name a regular file, with lines `ms,add|remove,node`")
    if found.st_size > MOST_BYTES:
        raise UserError(
            f"{path} has {found.st_size / 1e6:,.0f} MB; at most {MOST_BYTES / 1e6:,.0f} are read; use a shorter trace"
        )


def _changes(path: Path, rows: Iterable[tuple[int, list[str]]]) -> tuple[list[Change], float]:
    """Reads Bamboo's and Oobleck's format; also returns when the trace ends."""
    found: list[Change] = []
    here: set[str] = set()
    for number, row in rows:
        where = _where(path, number, row)
        if len(row) != 3 or row[1].strip() not in (ADD, REMOVE) or not row[2].strip():
            raise UserError(f"{where}; a line is `ms,add|remove,node`, as in `60000,add,node1`")
        at_s, kind, node = _milliseconds(where, row[0]), row[1].strip(), row[2].strip()
        if found and at_s < found[-1].at_s:
            raise UserError(f"{where}; it is earlier than the line before; sort the lines by time")
        if (kind == ADD) == (node in here):
            raise UserError(f"{where}; that machine is {'there already' if kind == ADD else 'not there'}")
        (here.add if kind == ADD else here.discard)(node)
        found.append(Change(at_s, kind, node))
    shift_s = found[0].at_s
    return [Change(x.at_s - shift_s, x.kind, x.node) for x in found], found[-1].at_s - shift_s


def _where(path: Path, number: int, row: list[str]) -> str:
    text = ",".join(row)
    return f"{path}, line {number}: {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'!r}"


def _milliseconds(where: str, text: str) -> float:
    try:
        value = float(text) / 1000
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UserError(f"{where}; {text!r} is no time; write milliseconds from the start, as in 60000")
    return value


def _sizes(path: Path, rows: Iterable[tuple[int, list[str]]], seed: int) -> tuple[list[Change], float]:
    """Reads samples of the number of machines, the last of which ends the trace; draws which machines go."""
    draw = random.Random(seed)
    first: datetime | None = None
    here: list[str] = []
    found: list[Change] = []
    count, last_s = 0, 0.0
    for number, row in rows:
        where = _where(path, number, row)
        try:
            at, size = datetime.fromisoformat(f"{row[0].strip()} {row[1].strip()}"), int(row[2])
            at = at.replace(tzinfo=at.tzinfo or UTC)
        except (ValueError, IndexError):
            raise UserError(f"{where}; a line is `date, time, machines`, as in `2021-12-11, 11:11:30, 55`") from None
        first = first or at
        at_s = (at - first).total_seconds()
        if at_s < last_s or size < 0:
            raise UserError(f"{where}; times go up, and there are 0 machines or more")
        last_s = at_s
        if len(found) + abs(size - len(here)) > MOST:
            raise UserError(f"{where}; with it more than {MOST:,} machines come and go; use a shorter trace")
        while len(here) < size:
            here.append(f"node{count}")
            count += 1
            found.append(Change(at_s, ADD, here[-1]))
        while len(here) > size:
            found.append(Change(at_s, REMOVE, here.pop(draw.randrange(len(here)))))
    return found, last_s


def poisson(replicas: int, *, mtbf_s: float, hours: float, back_s: float, together: int = 1, seed: int = 0) -> Trace:
    """A fleet of constant size whose machines fail, each at random.

    Args:
        replicas: number of machines.
        mtbf_s: mean time between two failures of the whole fleet; inf: none.
        hours: length of the trace.
        back_s: seconds from a failure until a replacement arrives.
        together: machines that fail at the same time (bulk preemption).
        seed: of the draws.

    Raises:
        UserError: more than `MOST` machines would come and go.
    """
    draw = random.Random(seed)
    expected = replicas + 2 * together * 3600 * hours / mtbf_s
    if expected > MOST:
        raise UserError(
            f"{plural.count(replicas, 'machine')} for {hours:g} h with a failure in {mtbf_s:g} s in the whole fleet: "
            f"{expected:.1g} times a machine would come or go; at most {MOST:,}; use fewer machines or hours, or a "
            "longer mean time between failures (in seconds or as in 6h)"
        )
    end_s, here, count = 3600 * hours, [f"node{number}" for number in range(replicas)], replicas
    changes = [Change(0.0, ADD, node) for node in here]
    back: list[float] = []
    at_s = draw.expovariate(1 / mtbf_s) if mtbf_s < math.inf else math.inf
    while min((at_s, *back[:1])) < end_s:
        if back and back[0] <= at_s:
            here.append(f"node{count}")
            count += 1
            changes.append(Change(back.pop(0), ADD, here[-1]))
            continue
        for _ in range(min(together, len(here))):
            changes.append(Change(at_s, REMOVE, here.pop(draw.randrange(len(here)))))
            back.append(at_s + back_s)
        at_s += draw.expovariate(1 / mtbf_s)
    failures = f"a failure every {span(mtbf_s)} in the whole fleet" if mtbf_s < math.inf else "no failure"
    return Trace(f"{plural.count(replicas, 'machine')}, {failures}", tuple(changes), end_s)


def span(seconds: float) -> str:
    """Whole hours or minutes, else seconds: ``2 h``, ``10 min``, ``5400.5 s``."""
    for unit, unit_s in (("h", 3600), ("min", 60)):
        if seconds >= unit_s and not seconds % unit_s:
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds:g} s"
