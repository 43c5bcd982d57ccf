"""The outer steps of a run, folded: when they were decided, the steps in them, bytes sent, and waiting times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ftopt.common.spread import Spread
from ftopt.watch.decisions import Incarnation
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.report.steps import Steps
from ftopt.watch.thin import Ends, Thinned

Position = tuple[int, int]
"""Fragment and version."""
Point = tuple[float, float]
_OPEN = 500
"""Number of outer steps that may still get lines of their members."""
_CURVE = 2_000
_MARKS = 1_000
_DOTS = 2_000
_LOSSES = 5_000


def moments() -> Thinned[float]:
    """Times to mark; of merged neighbours the first."""
    return Thinned(_MARKS, lambda first, second: first)


@dataclass(slots=True)
class Round:
    """One committed outer step or, without the coordinator's events, what its members have reported of it. ``steps``,
    ``bytes_sent``: of each replica. ``aborted``: attempts that failed before it. ``seconds``: the longest reduction."""

    fragment: int
    version: int
    t_s: float
    inner_step: int
    steps: dict[str, int] = field(default_factory=dict)
    aborted: int = 0
    bytes_sent: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Rounds:
    """Folds events in order. ``decided``: the coordinator's events are there. ``sent``: megabytes so far, over time.
    ``sizes``: fragment -> the bytes that a replica sent in one outer step."""

    def __init__(self, *, decided: bool) -> None:
        self._decided = decided
        self._open: dict[Position, Round] = {}
        self._aborted: Counter[Position] = Counter()
        self._prepared: dict[Position, dict[str, tuple[int, float]]] = defaultdict(dict)
        self.shown = Ends[Round]()
        self.moments = moments()
        self.sent = Thinned[Point](_CURVE, lambda first, second: second)
        self.total = 0
        self.sizes: dict[int, Spread] = {}

    def add(self, event: Line) -> None:
        name, at = event["event"], (event.get("fragment", 0), event.get("version", 0))
        if name == "prepare":
            data = data_of(event)
            self._prepared[at][event["replica"]] = int(data["bytes"]), float(data["seconds"])
        elif name == "decide":
            steps = {member[0]: member[2] for member in data_of(event)["members"]}
            self._open[at] = Round(*at, event["t_s"], event["inner_step"], steps)
        elif name == "abort":
            self._aborted[at] += 1
        elif name == "commit" and not self._decided:
            self._open.setdefault(at, Round(*at, event["t_s"], event.get("inner_step", 0)))
        if len(self._open) > 2 * _OPEN:
            self._close([*self._open][:_OPEN])

    def close(self) -> None:
        self._close([*self._open])

    def _close(self, positions: list[Position]) -> None:
        made = []
        for at in positions:
            each, prepared = self._open.pop(at), self._prepared.pop(at, {})
            each.aborted = self._aborted.pop(at, 0)
            each.bytes_sent = {replica: sent for replica, (sent, _) in prepared.items()}
            each.seconds = max((seconds for _, seconds in prepared.values()), default=0.0)
            made.append(each)
        for each in sorted(made, key=lambda x: x.t_s):
            self._show(each)
        newest = dict(positions)
        for known in (self._aborted, self._prepared):  # attempts without a result
            for at in [at for at in known if at[1] <= newest.get(at[0], -1) - _OPEN]:
                del known[at]

    def _show(self, made: Round) -> None:
        self.shown.add(made)
        self.moments.add(made.t_s)
        self.total += sum(made.bytes_sent.values())
        self.sent.add((made.t_s, self.total / 1e6))
        sizes = self.sizes.setdefault(made.fragment, Spread())
        for count in made.bytes_sent.values():
            sizes.add(count)


class Staleness:
    """Folds the ages of contributions. ``ages``: outer steps of the fragment missed since the replica's previous one ->
    number of contributions. ``delays``: inner steps from the snapshot of each until its result was applied."""

    def __init__(self, steps: Mapping[str, Steps]) -> None:
        self._steps = steps
        self._last: dict[tuple[int, str, int], int] = {}
        self._proposed: dict[tuple[str, int, int], dict[int, float]] = {}
        self.ages: Counter[int] = Counter()
        self.delays = Spread()

    def add(self, event: Line) -> None:
        name, fragment = event["event"], event.get("fragment", 0)
        if name == "decide":
            for replica, incarnation, *_ in data_of(event)["members"]:
                who = (fragment, replica, incarnation)
                self.ages[max(0, event["version"] - self._last.get(who, event["version"] - 1) - 1)] += 1
                self._last[who] = event["version"]
            return
        proposed = self._proposed.setdefault((event["replica"], event["incarnation"], fragment), {})
        if name == "propose":
            proposed[event["version"]] = event["t_s"]
            if len(proposed) > _OPEN:
                del proposed[next(iter(proposed))]
        elif (since := proposed.pop(event["version"], None)) is not None:
            own = self._steps.get(event["replica"])
            self.delays.add(own.between(since, event["t_s"]) if own is not None else 0)


class Waits:
    """How long outer steps have kept a replica's training thread. ``dies``: one of its incarnations has died.
    ``lasting``: the waits of those that have not. ``longest``: how long, and when it ended. ``drawn``: ends and
    lengths."""

    def __init__(self, replicas: int, *, dies: bool) -> None:
        self.every = Spread()
        self.lasting = Spread() if dies else self.every
        self.longest = (-1.0, 0.0)
        self.drawn = Thinned[Point](max(1, _DOTS // replicas), lambda a, b: max(a, b, key=lambda point: point[1]))

    def add(self, t_s: float, stall_s: float, *, lasts: bool) -> None:
        self.every.add(stall_s)
        if lasts and self.lasting is not self.every:
            self.lasting.add(stall_s)
        self.longest = max(self.longest, (stall_s, t_s))
        self.drawn.add((t_s, stall_s))


class Heard:
    """Folds the losses that the coordinator has reported for replicas without any steps on record."""

    def __init__(self, steps: Mapping[str, Steps]) -> None:
        self._recorded = {replica for replica, own in steps.items() if own}
        self._of: dict[Incarnation, Thinned[tuple[float, ...]]] = {}

    def add(self, event: Line) -> None:
        """Takes up a `losses` event."""
        for replica, (incarnation, inner_step, loss) in data_of(event)["losses"].items():
            if replica not in self._recorded:
                known = self._of.setdefault((replica, incarnation), Thinned(_LOSSES, _mean))
                known.add((event["t_s"], inner_step, float(loss)))

    @property
    def of(self) -> dict[str, Steps]:
        """Replica -> these losses; if there are very many, means of two consecutive ones, of four and so on."""
        found: dict[str, Steps] = {}
        for (replica, incarnation), known in sorted(self._of.items()):
            for t_s, inner_step, loss in known.points:
                found.setdefault(replica, Steps()).add(t_s, incarnation, round(inner_step), loss)
        return found


def _mean(first: tuple[float, ...], second: tuple[float, ...]) -> tuple[float, ...]:
    return tuple((a + b) / 2 for a, b in zip(first, second, strict=True))
