"""Replicas' states over time, of bounded size: a lane of spans for each, the times when one was down, and whom they
have waited for."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ftopt.watch.decisions import Incarnation
from ftopt.watch.thin import Thinned

_SPANS = 4_000
"""Spans of all replicas of a coordinator's job; there may be twice as many for a while."""
_FAILURES = 50
_AWAITED = 16
"""Most replicas for which one has waited that are known."""
_NONE_S = 1e-6
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
    """The states of a replica, one after the other. ``most`` spans: see `Thinned`. ``seconds``: state -> total time."""

    def __init__(self, most: int) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.spans = Thinned[_States](most, _joined)
        self._last: Span | None = None

    def __iter__(self) -> Iterator[Span]:
        return self._from(0)

    def _from(self, at: int) -> Iterator[Span]:
        last: Span | None = None
        for start, stop, states in self.spans.points[at:]:
            state = max(states, key=lambda name: states[name])
            if last is not None and last.state == state and last.stop == start:
                last = Span(last.start, stop, state)
                continue
            if last is not None:
                yield last
            last = Span(start, stop, state)
        if last is not None:
            yield last

    def add(self, span: Span) -> None:
        if self._last is not None and self._last.state == span.state and self._last.stop == span.start:
            self._last = Span(self._last.start, span.stop, span.state)
            return
        self.close()
        self._last = span

    def after(self, t_s: float) -> list[Span]:
        """The spans that end after ``t_s``, the last one included."""
        newer = self._from(bisect_right(self.spans.points, t_s, key=itemgetter(1)))
        return [*newer, *([self._last] if self._last is not None else [])]

    def close(self) -> None:
        """Ends the last span: no further one continues it."""
        if (span := self._last) is not None:
            self._last, lasted = None, span.stop - span.start
            self.seconds[span.state] += lasted
            self.spans.add((span.start, span.stop, {span.state: lasted}))


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
    """A replica's lane. ``step``: its inner step. ``waiting``: the share of the last sample that it has waited.
    ``shown``: its incarnation, and the seconds of its waits that the lane shows or that came before. ``failure``: the
    one that it is down for. ``back_at``: its inner step when it came back."""

    lane: Lane
    until_s: float
    step: int = 0
    waiting: float = 0.0
    shown: tuple[int, float] = (0, 0.0)
    failure: dict[str, Any] | None = None
    back_at: int | None = None

    def add(self, t_s: float, x: Mapping[str, Any], state: str) -> None:
        """Goes on until ``t_s``. Waits are often shorter than a sample: they last as long as ``x`` has reported."""
        (life, shown_s), took_s = self.shown, max(0.0, t_s - self.until_s)  # clocks are set back, too
        told_s = (x["counts"] or {}).get("waited_s", shown_s)
        shown_s = shown_s if life == x["incarnation"] else told_s
        up = state in ("training", "waiting")
        waited_s = min(took_s, max(0.0, told_s - shown_s)) if up else 0.0
        if state == "waiting" and (x["counts"] is None or x["inner_step"] == self.step):
            waited_s = took_s
        self.waiting = waited_s / took_s if up and took_s > 0 else float(x["state"] == "waiting")
        self.shown = x["incarnation"], shown_s + waited_s
        self.step, state = x["inner_step"], "training" if state == "waiting" else state
        for start, stop, what in ((self.until_s, t_s - waited_s, state), (t_s - waited_s, t_s, "waiting")):
            if stop > start:
                self.lane.add(Span(start, stop, what))
        self.until_s = t_s


class Lanes:
    """What the replicas of a coordinator's job have been doing, sampled every few seconds.

    Attributes:
        failures: the last ones: ``replica``; ``from`` and ``to`` (None: it is down), seconds; ``steps``: its inner
            steps; ``pending``: those in no version (None: not known); ``lost``: those lost with it (None: none, or not
            known yet); ``gone``: it did not come back; ``before``: it was away at the first sample.
    """

    def __init__(self) -> None:
        self._of: dict[str, _Replica] = {}
        self._begun = False
        self._lost: dict[str, float] = {}  # replica -> when its connection ended
        self._counted: dict[str, tuple[int, int]] = {}  # replica -> incarnation, and its last step in a version
        self.failures: deque[dict[str, Any]] = deque(maxlen=_FAILURES)

    def sample(self, t_s: float, replicas: Sequence[Mapping[str, Any]]) -> None:
        """Takes up the state of each replica that the job knows, at ``t_s``, in seconds since the job's start."""
        here = {x["replica"]: x for x in replicas}
        for name in self._of.keys() - here:
            self._counted.pop(name, None), self._lost.pop(name, None)
            if (failure := self._of.pop(name).failure) is not None:
                failure |= {"to": t_s, "gone": True, "lost": failure["pending"] or 0}
        for name in here.keys() - self._of:
            self._of[name] = _Replica(Lane(_SPANS), t_s)
        for name, x in here.items():
            own = self._of[name]
            own.lane.spans.most = max(16, _SPANS // len(here))
            own.add(t_s, x, self._state(own, x, t_s))
        self._begun = True

    def waiting(self, x: Mapping[str, Any]) -> float:
        """The share of the last sample that a replica has waited; 1 if it waits now, and was in none."""
        own = self._of.get(x["replica"])
        return float(x["state"] == "waiting") if own is None else own.waiting

    def lost(self, t_s: float, replica: str) -> None:
        """Takes up a `lost` event."""
        self._lost[replica] = t_s

    def resumed(self, replica: str) -> None:
        """Takes up a `return` of a process that has resumed a checkpoint: the former one's pending steps are lost."""
        if (own := self._of.get(replica)) is not None:
            own.shown = 0, 0.0
            if own.failure is not None:
                own.failure["lost"] = own.failure["pending"] or 0

    def decided(self, members: Iterable[Sequence[Any]]) -> None:
        """Takes up the ``members`` of a `decide` event of fragment 0: a lost one's steps may be in it."""
        self._counted |= {x[0]: (x[1], x[3]) for x in members}
        for failure in self.failures:
            if failure["lost"] is None:
                failure["pending"] = self._pending(**failure)

    def _pending(self, replica: str, incarnation: int, steps: int, pending: int | None, **_: object) -> int | None:
        """The steps in no version: the replica may have counted them before the last one."""
        life, last = self._counted.get(replica, (0, 0))
        return pending if pending is None or life != incarnation else min(pending, max(0, steps - last))

    def _state(self, own: _Replica, x: Mapping[str, Any], t_s: float) -> str:
        """A replica that was away is down until it has taken an inner step."""
        failure = own.failure
        if x["state"] == "away":
            own.back_at = None
            if failure is None:
                own.failure = {name: x[name] for name in ("replica", "incarnation")}
                own.failure |= {name: (x["counts"] or {}).get(name) for name in ("steps", "pending")}
                own.failure["pending"] = self._pending(**own.failure)
                from_s = max(own.until_s, self._lost.pop(x["replica"], t_s))
                own.failure |= {"from": from_s, "to": None, "lost": None, "gone": False, "before": not self._begun}
                self.failures.append(own.failure)
            return "dead"
        if failure is not None:
            before = failure["steps"] or 0
            if x["incarnation"] != failure["incarnation"]:  # else it has kept them
                failure["lost"], before = failure["pending"] or 0, 0
            own.back_at = x["inner_step"] if own.back_at is None else own.back_at
            steps = (x["counts"] or {}).get("steps", 0)
            if x["state"] not in _RESTING and x["inner_step"] <= own.back_at and steps <= before:
                return "dead"
            failure["to"], own.failure = t_s, None
        return "fetching" if x["state"] == "fetching" else level(x)

    def after(self, t_s: float, names: Sequence[str]) -> dict[str, list[Any]]:
        """Replica -> start, stop and state of each of its spans that end after ``t_s``, one after the other."""
        known = {name: self._of[name].lane.after(t_s) for name in names if name in self._of}
        return {name: [y for x in spans for y in (x.start, x.stop, x.state)] for name, spans in known.items()}


class Awaited:
    """Whom replicas have waited for, as `quorum` events say: from a replica's proposal to the attempt, for the replica
    that the round awaited last; from a failed attempt to the next one, for one that is missing there. ``of``:
    incarnation -> replica -> seconds. ``last``: incarnation -> the last of these waits, if its last attempt had one."""

    def __init__(self) -> None:
        self.of: dict[Incarnation, Counter[str]] = {}
        self.last: dict[Incarnation, tuple[str, float]] = {}
        self._failed: dict[int, tuple[float, set[Incarnation]]] = {}  # fragment -> its last attempt

    def add(self, t_s: float, fragment: int, data: Mapping[str, Any]) -> None:
        """Takes up a `quorum` event."""
        members, whom, most_s = [(x, life) for x, life in data["members"]], data.get("for"), float("inf")
        if data.get("retry") and (before := self._failed.get(fragment)):
            whom, most_s = min((x for x, _ in before[1].difference(members)), default=None), t_s - before[0]
        self._failed[fragment] = t_s, set(members)
        for who, waited_s in zip(members, data.get("waited", ()), strict=False):
            self.last.pop(who, None)
            if whom is not None and who[0] != whom and waited_s is not None:
                waits = self.of.setdefault(who, Counter())
                self.last[who] = whom, min(waited_s, most_s)
                waits[whom] += min(waited_s, most_s)
                if len(waits) > _AWAITED:
                    del waits[min(waits, key=lambda x: waits[x])]

    def within(self, who: Incarnation, waited_s: float, longest_s: float) -> dict[str, Any]:
        """Whom an incarnation has waited for in the ``waited_s`` for which outer steps have kept it from inner steps,
        for ``longest_s`` at most at a time. One that leaves or dies waits for its last outer step without an inner step
        to follow: this wait is not among them."""
        waits, (whom, last_s) = dict[str, float](self.of[who]), self.last.get(who, ("", 0.0))
        if sum(waits.values()) > waited_s or last_s > longest_s:
            waits[whom] = waits.get(whom, 0.0) - last_s
        waits = {name: seconds for name, seconds in waits.items() if seconds > _NONE_S}
        most = min(1.0, waited_s / max(_NONE_S, sum(waits.values())))  # what remains must not be more, either
        return {name: seconds * most for name, seconds in waits.items()}

    def told(self, x: Mapping[str, Any]) -> list[Any] | None:
        """How long a replica of ``/status`` has waited in all, as it has reported; and for whom longest, and how long,
        unless it trains meanwhile. None: not known."""
        if not (counts := x.get("counts")) or "waited_s" not in counts:
            return None
        waited_s, waits = counts["waited_s"], self.of.get((x["replica"], x["incarnation"]), Counter[str]())
        return [waited_s, *(waits.most_common(1)[0] if waits and is_kept_waiting(waited_s, waits.total()) else ())]

    def keep(self, those: Collection[Incarnation]) -> None:
        """Forgets all others."""
        self.of = {who: waits for who, waits in self.of.items() if who in those}
        self.last = {who: wait for who, wait in self.last.items() if who in those}


def is_kept_waiting(waited_s: float, gathering_s: float) -> bool:
    """Whether a replica that has waited ``waited_s`` waits for outer steps to begin, which took ``gathering_s`` from
    its proposals on; else it trains meanwhile (``delay``)."""
    return waited_s >= 0.5 * gathering_s
