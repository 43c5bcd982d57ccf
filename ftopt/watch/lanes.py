"""Replicas' states over time, of bounded size: a lane of spans for each, and the times when one was down."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ftopt.watch.thin import Thinned

_SPANS = 4_000
"""Spans of all replicas of a coordinator's job; there may be twice as many for a while."""
_FAILURES = 50
_RESTING = ("standby", "done", "out_of_units")
"""States in which a replica takes no step."""


@dataclass(frozen=True, slots=True)
class Span:
    """From ``start`` to ``stop``, in the run's seconds."""

    start: float
    stop: float
    state: str


_States = tuple[float, float, dict[str, float]]
"""Start and stop of a part of a lane, and the seconds in each state."""


class Lane:
    """The states of a replica, one after the other. ``most``: spans, see `Thinned`.

    Attributes:
        seconds: state -> total time.
    """

    def __init__(self, most: int) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._spans = Thinned[_States](most, _joined)
        self._last: Span | None = None

    def __iter__(self) -> Iterator[Span]:
        """The spans."""
        return self._from(0)

    def _from(self, at: int) -> Iterator[Span]:
        last: Span | None = None
        for start, stop, states in self._spans.points[at:]:
            state = max(states, key=lambda name: states[name])
            if last is not None and last.state == state and last.stop == start:
                last = Span(last.start, stop, state)
                continue
            if last is not None:
                yield last
            last = Span(start, stop, state)
        if last is not None:
            yield last

    def keep(self, most: int) -> None:
        """Changes the number of spans that are kept."""
        self._spans.most = most

    @property
    def thinned(self) -> bool:
        return self._spans.stride > 1

    def add(self, span: Span) -> None:
        """Adds the next span."""
        if self._last is not None and self._last.state == span.state and self._last.stop == span.start:
            self._last = Span(self._last.start, span.stop, span.state)
            return
        self.close()
        self._last = span

    def after(self, t_s: float) -> list[Span]:
        """The spans that end after ``t_s``, the last one included."""
        newer = self._from(bisect_right(self._spans.points, t_s, key=itemgetter(1)))
        return [*newer, *([self._last] if self._last is not None else [])]

    def close(self) -> None:
        """Ends the last span: no further one continues it."""
        if (span := self._last) is not None:
            self._last, lasted = None, span.stop - span.start
            self.seconds[span.state] += lasted
            self._spans.add((span.start, span.stop, {span.state: lasted}))


def _joined(first: _States, second: _States) -> _States:
    states = {name: first[2].get(name, 0.0) + second[2].get(name, 0.0) for name in {**first[2], **second[2]}}
    return first[0], second[1], states


def level(replica: Mapping[str, Any]) -> str:
    """The state in which a replica of ``/status`` is drawn and counted."""
    if replica["state"] == "away" or replica["stalled"]:
        return "away" if replica["state"] == "away" else "stalled"
    return replica["state"] if replica["state"] in ("training", "waiting") else "other"


@dataclass(slots=True)
class _Replica:
    """A replica's lane. ``failure``: the one that it is down for. ``back_at``: its inner step when it came back."""

    lane: Lane
    until_s: float
    failure: dict[str, Any] | None = None
    back_at: int | None = None


class Lanes:
    """What the replicas of a coordinator's job have been doing, sampled every few seconds.

    Attributes:
        failures: the last ones: ``replica``; ``from`` and ``to`` (None: it is down), seconds; ``lost``: the inner steps
            lost with it (None: none, or not known yet); ``gone``: it did not come back; ``before``: it was away at the
            first sample.
    """

    def __init__(self) -> None:
        self._of: dict[str, _Replica] = {}
        self._begun = False
        self.failures: deque[dict[str, Any]] = deque(maxlen=_FAILURES)

    def sample(self, t_s: float, replicas: Sequence[Mapping[str, Any]]) -> None:
        """Takes up the state of each replica that the job knows, at ``t_s``, in seconds since the job's start."""
        here = {x["replica"]: x for x in replicas}
        for name in self._of.keys() - here:
            if (failure := self._of.pop(name).failure) is not None:
                failure |= {"to": t_s, "gone": True, "lost": failure["pending"]}
        for name in here.keys() - self._of:
            self._of[name] = _Replica(Lane(_SPANS), t_s)
        for name, x in here.items():
            own = self._of[name]
            own.lane.keep(max(16, _SPANS // len(here)))
            state = self._state(own, x, t_s)
            if t_s > own.until_s:
                own.lane.add(Span(own.until_s, t_s, state))
            own.until_s = t_s
        self._begun = True

    def _state(self, own: _Replica, x: Mapping[str, Any], t_s: float) -> str:
        """A replica that was away is down until it has taken an inner step."""
        failure = own.failure
        if x["state"] == "away":
            own.back_at = None
            if failure is None:
                own.failure = {
                    "replica": x["replica"], "from": t_s, "to": None, "lost": None, "gone": False,
                    "before": not self._begun, "incarnation": x["incarnation"],
                    "pending": (x["counts"] or {}).get("pending", 0),
                }  # fmt: skip
                self.failures.append(own.failure)
            return "dead"
        if failure is not None:
            if x["incarnation"] != failure["incarnation"]:  # else it has kept them
                failure["lost"] = failure["pending"]
            own.back_at = x["inner_step"] if own.back_at is None else own.back_at
            if x["state"] not in _RESTING and x["inner_step"] <= own.back_at:
                return "dead"
            failure["to"], own.failure = t_s, None
        return "fetching" if x["state"] == "fetching" else level(x)

    def after(self, t_s: float, names: Sequence[str]) -> dict[str, list[Any]]:
        """Replica -> start, stop and state of each of its spans that end after ``t_s``, one after the other."""
        known = {name: self._of[name].lane.after(t_s) for name in names if name in self._of}
        return {name: [y for x in spans for y in (x.start, x.stop, x.state)] for name, spans in known.items()}
