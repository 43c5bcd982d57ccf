"""Which samples of a run are in its commits of fragment 0, recounted from its events alone.

The sample ledger counts units: ``batch_size`` samples each, fewer in the last unit of an epoch (or none, with
``drop_last``), numbered through all epochs. Each ``decide`` event of fragment 0 names the units of its contributions;
a coordinator that begins anew says what is done by then, so that a decision whose event was lost with the coordinator
is counted, and one that was rolled back is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ftopt.telemetry.jsonl import Line, data_of

UnitRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """Units ``start .. stop - 1``, which are in ``times`` contributions of commits."""

    start: int
    stop: int
    times: int


def list_units(events: Iterable[Line]) -> list[Entry]:
    """Every unit that is in a commit, in order, and how often.

    Args:
        events: the lines of ``events.jsonl``.
    """
    versions = _versions(events)
    edges: dict[int, int] = {}
    for ranges in versions.values():
        for start, stop in ranges:
            edges[start] = edges.get(start, 0) + 1
            edges[stop] = edges.get(stop, 0) - 1
    entries: list[Entry] = []
    times = 0
    for start, stop in pairwise([*sorted(edges), 0]):
        times += edges[start]
        if entries and (entries[-1].stop, entries[-1].times) == (start, times):
            entries[-1] = Entry(entries[-1].start, stop, times)
        elif times:
            entries.append(Entry(start, stop, times))
    return entries


def count_samples(events: Sequence[Line]) -> dict[str, int | None]:
    """``samples_*`` of ``summary.json``; None in a run without a ledger.

    ``committed``: samples that are in a commit, each of an epoch counted once. ``duplicated``: how often one is in a
    further commit, or was used by steps of one replica when another one's were committed. ``lost``: samples below the
    mark up to which all count as done, that are in no commit. ``discarded``: committed ones of contributions that were
    not finite.
    """
    settings = next((data_of(e)["samples"] for e in events if e["event"] in _BEGINS and "samples" in data_of(e)), None)
    names = ("samples_committed", "samples_duplicated", "samples_lost", "samples_discarded")
    if settings is None:
        return dict.fromkeys(names)
    entries = list_units(events)
    committed = sum(_size(settings, x.start, x.stop) for x in entries)
    twice = sum((x.times - 1) * _size(settings, x.start, x.stop) for x in entries)
    told = [part for event in events if event["event"] == "used_twice" for part in data_of(event)["ranges"]]
    twice += sum(_size(settings, start, stop) for start, stop in told)
    done_to = next((data_of(e)["done_to"] for e in reversed(events) if "done_to" in data_of(e)), 0)
    there = sum(_size(settings, x.start, min(x.stop, done_to)) for x in entries if x.start < done_to)
    discarded = 0
    for data in [data_of(event) for event in events if event["event"] == "decide"]:
        for replica in [replica for replica, *_, finite in data["members"] if not finite]:
            discarded += sum(_size(settings, start, stop) for start, stop in data.get("ranges", {}).get(replica, ()))
    return dict(zip(names, (committed, twice, _size(settings, 0, done_to) - there, discarded), strict=True))


_BEGINS = ("start", "recover")


def _versions(events: Iterable[Line]) -> dict[int, list[UnitRange]]:
    """Version of fragment 0 -> the units that its commit has added; -1: those of decisions whose events are lost."""
    versions: dict[int, list[UnitRange]] = {}
    for event in events:
        data = data_of(event)
        if event["event"] == "decide" and not event.get("fragment", 0):
            versions[event["version"]] = [(a, b) for ranges in data.get("ranges", {}).values() for a, b in ranges]
        elif event["event"] in _BEGINS and "done" in data:
            versions = {v: ranges for v, ranges in versions.items() if v <= event["version"]}
            known = [part for version, ranges in versions.items() if version >= 0 for part in ranges]
            versions[-1] = _without([(a, b) for a, b in data["done"]], known)
    return versions


def _without(ranges: Iterable[UnitRange], known: Iterable[UnitRange]) -> list[UnitRange]:
    """What of ``ranges`` is in none of ``known``."""
    left = list(ranges)
    for start, stop in known:
        parts = ((a, min(b, start)) for a, b in left), ((max(a, stop), b) for a, b in left)
        left = [(a, b) for part in parts for a, b in part if a < b]
    return left


def _size(settings: Line, start: int, stop: int) -> int:
    """Samples of the units ``start .. stop - 1``."""
    return _before(settings, stop) - _before(settings, start)


def _before(settings: Line, unit: int) -> int:
    samples, batch_size = settings["samples"], settings["batch_size"]
    per_epoch = samples // batch_size if settings["drop_last"] else -(-samples // batch_size)
    epochs, rest = divmod(unit, per_epoch)
    return int(epochs * min(samples, per_epoch * batch_size) + rest * batch_size)
