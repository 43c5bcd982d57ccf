"""Deaths of replicas that no `ftopt run` has started, and that nobody has therefore put on record when they happened.

An incarnation has died if its replica has a later one, or if the coordinator has lost it for good and nothing later of
its own is on record; and it has neither told its end nor that it starts again from the job's state. It died
when the coordinator lost its connection, or, where it has told something later than that, at the last that is on record
of it. What the next incarnation has written of its death bears that incarnation's time, and is left out. The replica
of a script writes nothing: all there is then is what the coordinator says of it, that it has joined, left or been lost.

Without the coordinator's events nobody knows whether it has died: all that is told then is that its record breaks off.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping

from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.report.steps import Steps

Incarnation = tuple[str, int]
BROKE_OFF = "broke_off"
"""The event in the place of `death` where the coordinator's are not there; no process emits it."""
_STATUS = "killed, crashed or cut off"
_LATE_S = 1.0
"""Clocks of two machines that were aligned may still differ by so much."""
_OWN_WORDS = frozenset(
    ("spawn", "started", "propose", "reduce", "commit", "apply", "stall", "fetch", "fetched", "evaluate")
)
"""Events that a replica alone emits."""


class Deaths:
    """Takes up the events in order; then it has a `death`, or `BROKE_OFF`, for each of them, as a run of ``ftopt run``
    has.

    Attributes:
        found: these, in the order of time.
    """

    def __init__(self) -> None:
        self.found: list[Line] = []
        self._supervised = False
        self._decided = False
        self._last: dict[Incarnation, float] = {}
        self._over: set[Incarnation] = set()
        self._left: set[Incarnation] = set()
        self._errors: dict[Incarnation, tuple[float, str]] = {}  # when an error has ended its loop, and which
        self._lost: dict[Incarnation, float] = {}
        self._back: dict[Incarnation, tuple[float, float]] = {}  # when it was lost, and when it came back
        self._joined: dict[Incarnation, float] = {}

    def add(self, event: Line) -> None:
        """One event."""
        name = event["event"]
        if _is_guess(event):
            return
        if name in _OWN_WORDS:
            who = (event["replica"], event["incarnation"])
            self._last[who] = max(event["t_s"], self._last.get(who, 0.0))
            if name == "spawn":
                self._supervised = self._supervised or "job" not in data_of(event)
        elif name in ("start", "recover", "decide", "quorum"):
            self._decided = True
        else:
            self._of_a_life(event, name, (event["replica"], event["incarnation"]))

    def _of_a_life(self, event: Line, name: str, who: Incarnation) -> None:
        if name in ("end", "reset", "over", "death"):
            self._over.add(who)
        if name in ("join", "return"):
            self._joined.setdefault(who, event["t_s"])
        if name == "lost":
            lost_s, back_s = self._back.get(who, (0.0, -_LATE_S))
            # Back for a moment: another process has claimed it, out of a checkpoint, and was given the next one.
            self._lost[who] = lost_s if event["t_s"] < back_s + _LATE_S else event["t_s"]
        elif name in ("return", "leave") and who in self._lost:
            self._back[who] = self._lost.pop(who), event["t_s"]
        if name == "leave":
            self._left.add(who)
            if reason := data_of(event).get("reason"):
                self._errors[who] = event["t_s"], f"ended by an error: {reason}"

    def keeps(self, event: Line) -> bool:
        """Whether an event is none of those that `found` replaces."""
        return self._supervised or not _is_guess(event)

    def close(self, steps: Mapping[str, Steps]) -> None:
        """All events were there."""
        if self._supervised:
            return
        trained: set[Incarnation] = set()
        last, lost = self._last, self._lost
        for replica, own in steps.items():
            for t_s, incarnation in zip(own.t_s, own.incarnation, strict=True):
                last[replica, incarnation] = max(t_s, last.get((replica, incarnation), 0.0))
                trained.add((replica, incarnation))
        last = {**self._joined, **last}
        over = self._over | (self._left - trained)  # a spare tells no end of its own
        newest: dict[str, int] = {}
        for replica, incarnation in last:
            newest[replica] = max(incarnation, newest.get(replica, 0))
        told: list[Line] = [
            {
                "t_s": lost[who] if t_s < lost.get(who, 0.0) + _LATE_S and who in lost else t_s,
                "event": "death" if self._decided else BROKE_OFF,
                "replica": who[0],
                "incarnation": who[1],
                "data": {"status": _STATUS},
            }
            for who, t_s in last.items()
            if who not in over
            and who not in self._errors
            and who[1] > 0
            and (who[1] < newest[who[0]] or (who in lost and t_s < lost[who] + _LATE_S))
        ]
        told += [
            {"t_s": t_s, "event": "death", "replica": who[0], "incarnation": who[1], "data": {"status": status}}
            for who, (t_s, status) in self._errors.items()
            if who not in self._over
        ]
        self.found = sorted(told, key=lambda event: float(event["t_s"]))

    def within(self, events: Iterable[Line]) -> Iterator[Line]:
        """The same events, with those that were found."""
        kept = events if self._supervised else filter(self.keeps, events)
        return heapq.merge(kept, self.found, key=lambda event: float(event["t_s"]))


class Within:
    """A run's events with these, as often as they are asked for."""

    def __init__(self, deaths: Deaths, events: Iterable[Line]) -> None:
        self._deaths, self._events = deaths, events

    def __iter__(self) -> Iterator[Line]:
        return self._deaths.within(self._events)


class Recorded:
    """Takes up the events in order; then it knows who has recorded what the coordinator says of it."""

    def __init__(self) -> None:
        self._decided: set[Incarnation] = set()
        self._joined: set[Incarnation] = set()
        self._heard: set[Incarnation] = set()

    def add(self, event: Line) -> None:
        """One event."""
        name = event["event"]
        if name == "decide":
            self._decided.update((member[0], member[1]) for member in data_of(event)["members"] if member[2])
        elif name == "join":
            self._joined.add((event["replica"], event["incarnation"]))
        elif name in _OWN_WORDS:
            self._heard.add((event["replica"], event["incarnation"]))

    def missing(self, steps: Mapping[str, Steps]) -> list[str]:
        """The replicas whose inner steps are not, or not all, on record, although the coordinator names them: those of
        scripts, which write no folder, and those whose folder was not given."""
        heard = self._heard | {(replica, incarnation) for replica, own in steps.items() for incarnation in own.lives()}
        missing = self._decided - heard if heard else self._decided | self._joined
        return sorted({replica for replica, _ in missing})


def _is_guess(event: Line) -> bool:
    """Whether it is of an earlier reading, or of the next incarnation."""
    status = data_of(event).get("status") if event["event"] == "death" else None
    return event["event"] == BROKE_OFF or status in (_STATUS, "unknown")
