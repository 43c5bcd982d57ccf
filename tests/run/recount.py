"""What a run's own lines say, counted again: which units are in its commits, and how the loss went."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from ftopt.sync.protocol.intervals import Range
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines

NEAR = 15
"""Inner steps on either side of a resume whose losses are compared."""


def units_by_version(folder: RunFolder) -> dict[int, list[Range]]:
    """Version of fragment 0 -> ranges of units, one for each contribution of its commit; the last word counts."""
    decided = [event for event in read_lines(folder.events) if event["event"] == "decide" and not event["fragment"]]
    return {
        event["version"]: [tuple(part) for parts in event["data"]["ranges"].values() for part in parts]
        for event in decided
    }


def that_stand(runs: Sequence[tuple[RunFolder, int]]) -> dict[int, list[Range]]:
    """`units_by_version` of runs that went on from one another: what a run did beyond the version that the next one
    went on from never was.

    Args:
        runs: each with the version that it went on from, 0 for the first.
    """
    standing: dict[int, list[Range]] = {}
    for folder, version in runs:
        standing = {v: units for v, units in standing.items() if v <= version} | units_by_version(folder)
    return standing


def times(units: dict[int, list[Range]]) -> Counter[int]:
    """Unit -> contributions that it is in."""
    return Counter(unit for parts in units.values() for first, stop in parts for unit in range(first, stop))


def losses(folder: RunFolder, first: int, last: int) -> list[float]:
    """Of all replicas' inner steps from ``first`` to ``last`` included."""
    rows = [row for path in sorted(folder.replicas.glob("*.jsonl")) for row in read_lines(path)]
    return [row["loss"] for row in rows if first <= row["inner_step"] <= last]


def loss_around(before: RunFolder, after: RunFolder, inner_step: int) -> tuple[float, float]:
    """The median loss of the run that died, around ``inner_step``, and of the one that went on there."""
    there, here = losses(before, inner_step - NEAR, inner_step + NEAR), losses(after, inner_step, inner_step + NEAR)
    return statistics.median(there), statistics.median(here)
