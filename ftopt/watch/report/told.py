"""What the replicas of scripts have done, as they have told the coordinator: they write no record of their own.

Its events have their counts (`ftopt.sync.protocol.values.Counts`): ``lost`` and ``leave`` those of the replica whose
connection ends, ``counts`` now and then those of all that are connected. Of a replica that is killed they are half a
second old or so. `Told.as_recorded` makes of them what `ftopt.watch.summary` computes with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.report.steps import Steps

Incarnation = tuple[str, int]


class Told:
    """Takes up the events in order.

    Attributes:
        counts: the last ones of each incarnation; `without` those that have a record of their own.
        committed: of each incarnation, the steps that decisions have counted.
    """

    def __init__(self) -> None:
        self.counts: dict[Incarnation, Line] = {}
        self.committed: Counter[Incarnation] = Counter()
        self._last: Counter[Incarnation] = Counter()  # of these steps the last one, by the incarnation's own count
        self._joined: set[Incarnation] = set()
        self._recorded: set[Incarnation] = set()
        self._restored = self._undone = False

    def add(self, event: Line) -> None:
        """One event."""
        name = event["event"]
        if name == "decide":
            if not event.get("fragment"):
                self._decide(data_of(event)["members"])
        elif name == "join":
            self._joined.add((event["replica"], event["incarnation"]))
        elif name == "end":  # its own word, also of a life that has taken no step
            self._recorded.add((event["replica"], event["incarnation"]))
        elif name == "restore":
            self._restored = True
        elif name in ("start", "recover"):
            self._undone = self._undone or bool(data_of(event).get("undone"))
        elif name in ("lost", "leave", "counts"):
            self.counts.update(_counts(event))

    def _decide(self, members: Sequence[Any]) -> None:
        for replica, incarnation, steps, last_step, _weight, finite in members:
            who = replica, incarnation
            self.committed[who] += steps if finite else 0
            self._last[who] = max(self._last[who], last_step)

    def without(self, steps: Mapping[str, Steps]) -> Told:
        """Once all events were there: those that have a record of their own count by that."""
        self._recorded |= {(replica, incarnation) for replica, own in steps.items() for incarnation in own.lives()}
        self.counts = {who: counts for who, counts in self.counts.items() if who not in self._recorded}
        return self

    def is_complete(self, silent: Sequence[str]) -> bool:
        """Whether each incarnation of the ``silent`` replicas whose steps are in the model has told its counts, or has
        a record of its own; not of a job that went back to an earlier version, where they do not add up."""
        known = self._recorded | self.counts.keys()
        return not self._undone and all(who in known for who in self.committed if who[0] in silent)

    def as_recorded(self) -> tuple[list[Line], Counter[Incarnation]]:
        """The lines that these incarnations would have written at their ends, and how many inner steps each has
        taken."""
        lines: list[Line] = []
        taken: Counter[Incarnation] = Counter()
        committed, last = self.committed, self._last
        for who, counts in self.counts.items():
            # A decision may have counted some after they were told.
            pending = min(counts["pending"], max(0, counts["steps"] - last[who]))
            accounted = committed[who] + pending + sum(counts["dropped"].values())
            # Of one that goes on from a checkpoint they are those before as well: what is accounted for, it has taken.
            taken[who] = max(counts["steps"], accounted) if who in self._joined and not self._restored else accounted
            at = {"replica": who[0], "incarnation": who[1], "t_s": 0.0}
            for reason, dropped in counts["dropped"].items():
                lines.append({**at, "event": "discarded", "data": {"steps": dropped, "reason": reason}})
            lines.append({**at, "event": "end", "data": {"reason": "left", "pending_steps": pending}})
        return lines, taken


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
