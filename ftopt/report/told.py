"""What the replicas of scripts have done, as they have told the coordinator: they write no record of their own.

Its events have their counts (`ftopt.sync.protocol.values.Counts`): ``lost`` and ``leave`` those of the replica whose
connection ends, ``counts`` now and then those of all that are connected. Of a replica that is killed they are half a
second old or so. `as_recorded` makes of them what `ftopt.telemetry.summary` computes with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftopt.report.steps import Steps
from ftopt.telemetry.jsonl import Line, data_of

Incarnation = tuple[str, int]


def told(events: Sequence[Line], steps: Mapping[str, Steps]) -> dict[Incarnation, Line]:
    """The last counts of each incarnation that has no record of its own."""
    found: dict[Incarnation, Line] = {}
    for event in events:
        for who, counts in _counts(event):
            found[who] = counts
    recorded = {(replica, incarnation) for replica, own in steps.items() for incarnation in set(own.incarnation)}
    return {who: counts for who, counts in found.items() if who not in recorded}


def _counts(event: Line) -> Iterator[tuple[Incarnation, Line]]:
    data = data_of(event)
    if event["event"] in ("lost", "leave") and "counts" in data:
        yield (event["replica"], event["incarnation"]), data["counts"]
    elif event["event"] == "counts":
        for replica, (incarnation, counts) in data["counts"].items():
            yield (replica, incarnation), counts


def are_counts(event: Line) -> bool:
    """Whether what an event has of them is what `told` reads."""
    try:
        return all(
            isinstance(who[1], int)
            and all(isinstance(counts[name], int) and counts[name] >= 0 for name in ("steps", "pending", "sent"))
            and isinstance(counts["waited_s"], int | float)
            and all(isinstance(dropped, int) for dropped in counts["dropped"].values())
            for who, counts in _counts(event)
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def is_complete(events: Sequence[Line], steps: Mapping[str, Steps], silent: Sequence[str]) -> bool:
    """Whether each incarnation of the ``silent`` replicas whose steps are in the model has told its counts, or has a
    record of its own; not of a job that went back to an earlier version, where they do not add up."""
    if any(data_of(event).get("undone") for event in events if event["event"] in ("start", "recover")):
        return False
    known = {(replica, incarnation) for replica, own in steps.items() for incarnation in set(own.incarnation)}
    known |= told(events, steps).keys()
    return all(who in known for who in _decided(events)[0] if who[0] in silent)


def as_recorded(events: Sequence[Line], steps: Mapping[str, Steps]) -> tuple[list[Line], Counter[Incarnation]]:
    """The lines that these incarnations would have written at their ends, and how many inner steps each has taken."""
    lines: list[Line] = []
    taken: Counter[Incarnation] = Counter()
    committed, last = _decided(events)
    joined = {(event["replica"], event["incarnation"]) for event in events if event["event"] == "join"}
    restored = any(event["event"] == "restore" for event in events)
    for who, counts in told(events, steps).items():
        # A decision may have counted some after they were told.
        pending = min(counts["pending"], max(0, counts["steps"] - last[who]))
        accounted = committed[who] + pending + sum(counts["dropped"].values())
        # Of one that goes on from a checkpoint they are those before as well: what is accounted for, it has taken.
        taken[who] = max(counts["steps"], accounted) if who in joined and not restored else accounted
        at = {"replica": who[0], "incarnation": who[1], "t_s": 0.0}
        for reason, dropped in counts["dropped"].items():
            lines.append({**at, "event": "discarded", "data": {"steps": dropped, "reason": reason}})
        lines.append({**at, "event": "end", "data": {"reason": "left", "pending_steps": pending}})
    return lines, taken


def _decided(events: Sequence[Line]) -> tuple[Counter[Incarnation], Counter[Incarnation]]:
    """Of each incarnation, the steps that decisions have counted, and the last of them by its own count."""
    committed: Counter[Incarnation] = Counter()
    last: Counter[Incarnation] = Counter()
    for event in events:
        members: Sequence[Any] = data_of(event)["members"] if event["event"] == "decide" else ()
        for replica, incarnation, steps, last_step, _weight, finite in () if event.get("fragment") else members:
            who = replica, incarnation
            committed[who] += steps if finite else 0
            last[who] = max(last[who], last_step)
    return committed, last
