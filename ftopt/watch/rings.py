"""A coordinator's memory of a job for the live page: rings of samples and the last events.

The memory is bounded, however long the job runs: samples every two seconds for ten minutes, a row per minute for six
hours, a row per quarter of an hour for four days (at most 1 MB per job), and `EVENTS` events. It is lost with the
process.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ftopt.common.printable import printable
from ftopt.events import Event
from ftopt.watch.jsonl import record_of, significant
from ftopt.watch.lanes import Awaited, Lanes, level
from ftopt.watch.sentences import TOGETHER, epochs_done, is_death, note_of, of_several
from ftopt.watch.thin import Thinned

SAMPLE_S = 2.0
RANGES = (("10 minutes", 1, 300), ("6 hours", 30, 360), ("4 days", 15, 384))
"""Name, rows of the next finer ring (or samples) per row, rows that are kept."""
EVENTS = 100
TESTS = 200
LEVELS = ("steps_per_s", "tokens_per_s", "training", "waiting", "other", "stalled", "away", "not_finite")
"""Columns that are averaged into a coarser row. ``not_finite``: replicas whose loss is NaN or infinite."""
COUNTS = {"outer_steps": "decide", "aborts": "abort", "stalls": "stalled", "lost": "lost", "deaths": "gone",
          "joins": "join"}  # fmt: skip
"""Columns that are summed, and the event that each counts; ``gone`` of a replica that has left is no death."""
LOSSES: dict[str, Callable[[Sequence[float]], float]] = {"loss": fmean, "loss_least": min, "loss_most": max}
"""Columns of the finite losses of connected replicas, and the function that makes one number of several; None if there
are none. `LINES_COLUMN` follows: the loss of each replica by its id, while there are few."""
LINES_COLUMN = "losses"
LINES = 8
"""Replicas whose losses are kept individually."""
COLUMNS = ("t_s", "inner_step", *LEVELS, *COUNTS, *LOSSES, LINES_COLUMN)
Row = tuple[Any, ...]
MAX_CHARS = 300
"""Length of a line about an event."""
_NAMED = 5
"""Replicas that a line names; it counts the others."""
_SILENT = ("halt", "held_open")
"""The job has a line of its own for the first; the second happens in good rounds, too."""


class Ring:
    """The last rows of one resolution. ``count``: rows ever added. ``coarser`` gets one row for ``every`` rows;
    ``waiting``: rows that it has not got yet."""

    def __init__(self, keep: int, coarser: Ring | None = None, every: int = 1) -> None:
        self._rows: deque[Row] = deque(maxlen=keep)
        self._coarser, self._every = coarser, every
        self.waiting: list[Row] = []
        self.count = 0

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self.count += 1
        if self._coarser is None:
            return
        self.waiting.append(row)
        if len(self.waiting) == self._every:
            self._coarser.add(_merged(self.waiting))
            self.waiting.clear()

    def after(self, count: int) -> list[Row]:
        """The rows after the first ``count``, as far as they are kept."""
        new = min(max(self.count - count, 0), len(self._rows))
        return list(self._rows)[len(self._rows) - new :]


def _merged(rows: Sequence[Row]) -> Row:
    of = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    names = {name for each in of[LINES_COLUMN] for name in each or ()}
    lines = {name: _one(fmean, [each.get(name) for each in of[LINES_COLUMN] if each]) for name in sorted(names)}
    return (
        *rows[-1][:2],
        *(round(fmean(of[x]), 3) for x in LEVELS),
        *(sum(of[x]) for x in COUNTS),
        *(_one(how, of[x]) for x, how in LOSSES.items()),
        lines if 0 < len(lines) <= LINES else None,
    )


def _one(how: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    """One number from those that are known, with six digits; None if none is."""
    known = [x for x in values if x is not None]
    return significant(how(known)) if known else None


def _losses(replicas: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    found = {x["replica"]: x["loss"] for x in replicas if isinstance(x["loss"], float) and x["state"] != "away"}
    return *(_one(how, found.values()) for how in LOSSES.values()), found if 0 < len(found) <= LINES else None


def _levels(replicas: Sequence[Mapping[str, Any]], lanes: Lanes) -> tuple[float, ...]:
    """The columns `LEVELS` without the speeds; a replica may have waited for a part of the sample."""
    states: dict[str, float] = {**Counter(level(x) for x in replicas)}
    states["not_finite"] = sum(isinstance(x["loss"], str) and x["state"] != "away" for x in replicas)
    at_work = [x for x in replicas if level(x) in ("training", "waiting")]
    waiting = sum(lanes.waiting(x) for x in at_work)
    states |= {"training": len(at_work) - waiting, "waiting": waiting}
    return tuple(round(states.get(x, 0), 3) for x in LEVELS[2:])


class Speed:
    """Inner steps per second that all replicas together have committed.

    Between two outer steps nothing is committed: the speed of the last one holds for as long as that step took, and
    then falls, as if an outer step of as many steps came now.
    """

    def __init__(self) -> None:
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Restarts at ``now`` (seconds), when the job starts or stops running: nothing is committed yet."""
        self._from_s = self._to_s = now
        self._steps = self._new = 0

    def committed(self, now: float, steps: int) -> None:
        if not self._new:
            self._from_s = self._to_s
        self._to_s, self._new = now, self._new + steps

    def now(self, now: float) -> float:
        """The speed; steps committed from here on count towards the next call."""
        if self._new:
            self._steps, self._new = self._new, 0
        took_s = max(self._to_s - self._from_s, now - self._to_s)
        return self._steps / took_s if took_s > 0 else 0.0


class Tokens:
    """Tokens per second that all replicas together have counted, over the last samples."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        self._sums: deque[tuple[float, int]] = deque(maxlen=6)  # times, and tokens so far
        self.per_s = 0.0

    def sample(self, now: float, replicas: Sequence[Mapping[str, Any]]) -> None:
        """Takes up each replica's count; that of a new incarnation begins anew."""
        before = self._known
        self._known = {x["replica"]: (x["incarnation"], x["counts"]["tokens"]) for x in replicas if x["counts"]}
        same = {name: x for name, x in self._known.items() if before.get(name, (0, 0))[0] == x[0]}
        new = sum(tokens - before[name][1] for name, (_, tokens) in same.items())
        self._sums.append((now, new + (self._sums[-1][1] if self._sums else 0)))
        (first_s, first), (last_s, last) = self._sums[0], self._sums[-1]
        self.per_s = max(0.0, (last - first) / (last_s - first_s)) if last_s > first_s else 0.0


class Evaluations:
    """The held-out losses that replicas have reported. ``found``: time, inner step and loss of each evaluation; of very
    many some."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, ...]] = {}
        self.found = Thinned[tuple[float, int, float]](TESTS, lambda first, second: second)

    def sample(self, t_s: float, replicas: Sequence[Mapping[str, Any]]) -> None:
        for x in replicas:
            found = (counts["tested_step"], counts["tested"]) if (counts := x["counts"]) else (0, None)
            if isinstance(found[1], float) and self._last.get(x["replica"]) != (x["incarnation"], *found):
                self._last[x["replica"]] = (x["incarnation"], *found)
                self.found.add((t_s, *found))
        self._last = {name: self._last[name] for name in self._last.keys() & {x["replica"] for x in replicas}}


@dataclass(slots=True)
class Told:
    """An event in words. ``at_s``: Unix time of the last of ``times`` such events in a row. ``names``: the first of the
    replicas that the line is about. ``alike``: the words were the same each time. ``epoch``: the first epoch of
    `epoch_done` events."""

    at_s: float
    text: str
    kind: tuple[str, str]
    times: int = 1
    names: list[str] = field(default_factory=list)
    alike: bool = True
    epoch: int | None = None

    def shown(self) -> dict[str, Any]:
        """The event as the live page gets it: ``text`` holds for each of the ``times``."""
        one = {"at_s": round(self.at_s, 1), "text": self.text, "times": 1}
        if self.times == 1 or self.names or self.epoch is not None:
            return one
        if self.alike:
            return one | {"times": self.times}
        return one | {"text": f"{self.text} (the last of {self.times} such events in a row)"}


class History:
    """The history of one job since this process runs it. ``began_s``: Unix time, and the id of this history.

    ``told``: number of events so far; it changes when there are new ones.
    """

    def __init__(self) -> None:
        self.began_s = time.time()
        self.told = 0
        self._events: deque[Told] = deque(maxlen=EVENTS)
        self._counts: Counter[str] = Counter()
        self._speed, self._tokens = Speed(), Tokens()
        self.lanes, self.awaited, self.evaluations = Lanes(), Awaited(), Evaluations()
        self._inner_step = 0
        self.rings: list[Ring] = []
        coarser, every = None, 1
        for _, per_row, keep in reversed(RANGES):
            coarser = Ring(keep, coarser, every)
            self.rings.insert(0, coarser)
            every = per_row

    def note(self, event: Event, now: float) -> None:
        """Takes up an event of the coordinator; ``now``: the clock of `sample`, in seconds."""
        if event.event in ("start", "recover", "rollback", "job_failed"):  # after the last two the job does not run
            self._speed.begin(now)
        elif event.event == "decide" and event.fragment == 0:
            self._speed.committed(now, sum(steps for _, _, steps, *_ in event.data["members"]))
            self.lanes.decided(event.data["members"])
        elif event.event == "quorum":
            self.awaited.add(now, event.fragment or 0, event.data)
        elif event.event == "lost":
            self.lanes.lost(round(time.time() - self.began_s, 1), event.replica)
        elif event.event == "return" and event.data.get("resumed"):
            self.lanes.resumed(event.replica)
        if event.event != "gone" or is_death(event):
            self._counts[event.event] += 1
        note = note_of(record_of(event))
        if note is None or event.event in _SILENT or (event.event == "gone" and event.data.get("reason") == "left"):
            return
        several = event.event in TOGETHER and not event.data.get("early")
        told = self.add_line(note.text, (event.event, "" if several else event.replica))
        if several:
            if told.times <= _NAMED:
                told.names.append(event.replica)
            if told.times > 1:
                told.text = of_several(event.event, told.names, told.times)
        elif event.event == "epoch_done":
            epoch = event.data.get("epoch", 0)
            told.epoch = epoch if told.epoch is None else told.epoch
            told.text = epochs_done(told.epoch, epoch)

    def add_line(self, text: str, kind: tuple[str, str]) -> Told:
        """Adds a line; if the last line is of the same kind, replaces it and counts it."""
        self.told, text = self.told + 1, printable(text, MAX_CHARS)
        last = self._events[-1] if self._events else None
        if last is None or last.kind != kind:
            last = Told(0.0, "", kind, times=0)
            self._events.append(last)
        last.alike = last.alike and last.text in ("", text)
        last.at_s, last.text, last.times = time.time(), text, last.times + 1
        return last

    def sample(self, replicas: Sequence[Mapping[str, Any]], now: float) -> None:
        """Adds a row. ``replicas``: as in ``/status``, with ``replica``, ``incarnation``, ``state``, ``stalled``,
        ``inner_step``, ``loss`` and ``counts``."""
        t_s = round(time.time() - self.began_s, 1)
        self._inner_step = max((x["inner_step"] for x in replicas if x["state"] != "away"), default=self._inner_step)
        self._tokens.sample(now, replicas)
        self.lanes.sample(t_s, replicas)
        self.awaited.keep({(x["replica"], x["incarnation"]) for x in replicas})
        self.evaluations.sample(t_s, replicas)
        speeds = [float(f"{speed:.4g}") for speed in (self._speed.now(now), self._tokens.per_s)]
        counts = [self._counts[x] for x in COUNTS.values()]
        self.rings[0].add((t_s, self._inner_step, *speeds, *_levels(replicas, self.lanes), *counts, *_losses(replicas)))
        self._counts.clear()

    def recent(self, ring: int, replicas: Sequence[Mapping[str, Any]]) -> Row:
        """A row of what no row of a ring has yet: the levels of now, and the counts since its last row (a coarse row
        comes up to a quarter of an hour late). ``replicas``: as for `sample`."""
        rows = [row for finer in self.rings[:ring] for row in finer.waiting]
        counts = [self._counts[x] + sum(row[COLUMNS.index(name)] for row in rows) for name, x in COUNTS.items()]
        last = self.rings[0].after(self.rings[0].count - 1)
        return (
            round(time.time() - self.began_s, 1),
            *(last[0][1:4] if last else (0, 0.0, 0.0)),
            *_levels(replicas, self.lanes),
            *counts,
            *_losses(replicas),
        )

    def events(self) -> list[dict[str, Any]]:
        """The last events, oldest first."""
        return [x.shown() for x in self._events]
