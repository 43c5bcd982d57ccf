"""Which samples of a run are in its commits of fragment 0, recounted from its events alone.

The sample ledger counts units: ``batch_size`` samples each, fewer in the last unit of an epoch (or none, with
``drop_last``), numbered through all epochs. Each ``decide`` event of fragment 0 names the units of its contributions; a
coordinator that restarts says what is done at that point, so that a decision is counted even if its event was lost with
the old coordinator, and is not counted if it was rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.versions import Range, Versions, without


@dataclass(frozen=True, slots=True)
class Entry:
    """Units ``start .. stop - 1``, which are in ``times`` contributions of commits."""

    start: int
    stop: int
    times: int


class Ledger:
    """Folds events in order."""

    def __init__(self) -> None:
        self._settings: Line | None = None
        self._edges: dict[int, int] = {}  # unit -> how many more contributions there are from there on
        self._added = Versions("qq")  # the units that each version has added
        self._untold: list[Range] = []  # of decisions whose events are lost
        self._twice: list[Range] = []
        self._discarded: list[Range] = []
        self._done_to = 0

    def add(self, event: Line) -> None:
        name, data = event["event"], data_of(event)
        if "done_to" in data:
            self._done_to = data["done_to"]
        if name == "decide":
            self._decide(event, data)
        elif name in ("start", "recover"):
            if self._settings is None and "samples" in data:
                self._settings = data["samples"]
            if "done" in data:
                _count(self._edges, self._added.go_back(event["version"]), -1)
                known = [(entry.start, entry.stop) for entry in _entries(self._edges)]
                self._untold = without([(a, b) for a, b in data["done"]], known)
        elif name == "used_twice":
            self._twice += [(a, b) for a, b in data["ranges"]]

    def _decide(self, event: Line, data: Line) -> None:
        ranges = data.get("ranges", {})
        for replica in [replica for replica, *_, finite in data["members"] if not finite]:
            self._discarded += [(a, b) for a, b in ranges.get(replica, ())]
        if not event.get("fragment", 0):
            new = [(a, b) for part in ranges.values() for a, b in part]
            _count(self._edges, self._added.put(event["version"], new), -1)  # of a repeated one the last counts
            _count(self._edges, new, 1)

    def entries(self) -> list[Entry]:
        """Every unit that is in a commit, in order, and in how many contributions."""
        edges = dict(self._edges)
        _count(edges, self._untold, 1)
        return _entries(edges)

    def figures(self) -> dict[str, int | None]:
        """``samples_*`` of ``summary.json``; None without a ledger. ``committed``: in a commit, once per epoch.
        ``duplicated``: how often one is in a further commit, or was used by steps of one replica when another one's
        were committed. ``lost``: in no commit, although all up to a mark above count as done. ``discarded``: committed,
        of contributions that were not finite; not those of dropped outliers, whose replica uses them once more."""
        names = ("samples_committed", "samples_duplicated", "samples_lost", "samples_discarded")
        settings, done_to = self._settings, self._done_to
        if settings is None:
            return dict.fromkeys(names)
        entries = self.entries()
        committed = sum(_size(settings, x.start, x.stop) for x in entries)
        twice = sum((x.times - 1) * _size(settings, x.start, x.stop) for x in entries)
        twice += sum(_size(settings, start, stop) for start, stop in self._twice)
        there = sum(_size(settings, x.start, min(x.stop, done_to)) for x in entries if x.start < done_to)
        discarded = sum(_size(settings, start, stop) for start, stop in self._discarded)
        return dict(zip(names, (committed, twice, _size(settings, 0, done_to) - there, discarded), strict=True))


def _count(edges: dict[int, int], ranges: Iterable[tuple[int, ...]], times: int) -> None:
    for start, stop in ranges:
        for unit, change in ((start, times), (stop, -times)):
            if change := edges.pop(unit, 0) + change:
                edges[unit] = change


def _entries(edges: dict[int, int]) -> list[Entry]:
    entries, times = list[Entry](), 0
    for start, stop in pairwise([*sorted(edges), 0]):
        times += edges[start]
        if times:
            entries.append(Entry(start, stop, times))
    return entries


def _size(settings: Line, start: int, stop: int) -> int:
    """Samples of the units ``start .. stop - 1``."""
    return _before(settings, stop) - _before(settings, start)


def _before(settings: Line, unit: int) -> int:
    samples, batch_size = settings["samples"], settings["batch_size"]
    per_epoch = samples // batch_size if settings["drop_last"] else -(-samples // batch_size)
    epochs, rest = divmod(unit, per_epoch)
    return int(epochs * min(samples, per_epoch * batch_size) + rest * batch_size)
