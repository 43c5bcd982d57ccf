"""The outer steps of a run, folded: when they were decided, whose steps they took, what they sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ftopt.watch.history import Incarnation
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.report.plot import Axis
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.thin import Curve, Ends, Greatest, Moments
from ftopt.watch.spread import Spread

Position = tuple[int, int]
"""Fragment and version."""
_OPEN = 500
"""So many outer steps may still get lines of their members."""
_CURVE = 4_000


@dataclass(slots=True)
class Round:
    """One committed outer step, or, without the coordinator's events, what its members have told of it.

    Args:
        fragment, version: what it made.
        t_s: when it was decided.
        inner_step: of the job, from then on.
        steps: replica -> its inner steps in it.
        aborted: attempts that failed before.
        bytes_sent: replica -> what it sent in the attempt that was prepared.
        seconds: the longest reduction of a member.
    """

    fragment: int
    version: int
    t_s: float
    inner_step: int
    steps: dict[str, int] = field(default_factory=dict)
    aborted: int = 0
    bytes_sent: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Rounds:
    """Folds events in order.

    Args:
        decided: the coordinator's events are there.
        x: the axis of the time.

    Attributes:
        shown: the first and the last ones.
        moments: when they were decided.
        sent: the bytes sent by then, in all.
        sizes: fragment -> the bytes that a replica sent in one.
    """

    def __init__(self, *, decided: bool, x: Axis) -> None:
        self._decided = decided
        self._open: dict[Position, Round] = {}
        self._aborted: Counter[Position] = Counter()
        self._prepared: dict[Position, dict[str, tuple[int, float]]] = defaultdict(dict)
        self.shown = Ends[Round]()
        self.moments = Moments(x)
        self.sent = Curve(_CURVE)
        self.sent.add(0.0, 0.0)
        self.total = 0
        self.sizes: dict[int, Spread] = {}

    def add(self, event: Line) -> None:
        """One event."""
        name = event["event"]
        if name == "prepare":
            data = data_of(event)
            self._prepared[_at(event)][event["replica"]] = int(data["bytes"]), float(data["seconds"])
        elif name == "decide":
            steps = {member[0]: member[2] for member in data_of(event)["members"]}
            self._open[_at(event)] = Round(*_at(event), event["t_s"], event["inner_step"], steps)
        elif name == "abort":
            self._aborted[_at(event)] += 1
        elif name == "commit" and not self._decided:
            self._open.setdefault(_at(event), Round(*_at(event), event["t_s"], event.get("inner_step", 0)))
        if len(self._open) > 2 * _OPEN:
            self._close([*self._open][:_OPEN])

    def close(self) -> None:
        """All events were there."""
        self._close([*self._open])

    def _close(self, positions: list[Position]) -> None:
        made = []
        for at in positions:
            each = self._open.pop(at)
            each.aborted = self._aborted.pop(at, 0)
            prepared = self._prepared.pop(at, {})
            each.bytes_sent = {replica: sent for replica, (sent, _) in prepared.items()}
            each.seconds = max((seconds for _, seconds in prepared.values()), default=0.0)
            made.append(each)
        for each in sorted(made, key=lambda x: x.t_s):
            self._show(each)
        newest = dict(positions)
        for known in (self._aborted, self._prepared):  # attempts that came to nothing
            for at in [at for at in known if at[1] <= newest.get(at[0], -1) - _OPEN]:
                del known[at]

    def _show(self, made: Round) -> None:
        self.shown.add(made)
        self.moments.add(made.t_s)
        self.sent.add(made.t_s, self.total / 1e6)
        self.total += sum(made.bytes_sent.values())
        self.sent.add(made.t_s, self.total / 1e6)
        sizes = self.sizes.setdefault(made.fragment, Spread())
        for count in made.bytes_sent.values():
            sizes.add(count)


def _at(event: Line) -> Position:
    return event.get("fragment", 0), event.get("version", 0)


class Staleness:
    """Folds how old contributions were.

    Attributes:
        ages: how many contributions had missed so many outer steps of their fragment since their replica's previous
            one.
        delays: of each contribution, the inner steps that its replica took from the snapshot until it applied the
            result.
    """

    def __init__(self, steps: Mapping[str, Steps]) -> None:
        self._steps = steps
        self._last: dict[tuple[int, str, int], int] = {}
        self._proposed: dict[tuple[str, int, int], dict[int, float]] = {}
        self.ages: Counter[int] = Counter()
        self.delays = Spread()

    def add(self, event: Line) -> None:
        """One event."""
        name, fragment = event["event"], event.get("fragment", 0)
        if name == "decide":
            for replica, incarnation, *_ in data_of(event)["members"]:
                who = (fragment, replica, incarnation)
                self.ages[max(0, event["version"] - self._last.get(who, event["version"] - 1) - 1)] += 1
                self._last[who] = event["version"]
        elif name == "propose":
            proposed = self._proposed.setdefault((event["replica"], event["incarnation"], fragment), {})
            proposed[event["version"]] = event["t_s"]
            if len(proposed) > _OPEN:
                del proposed[next(iter(proposed))]
        elif name == "apply":
            proposed = self._proposed.get((event["replica"], event["incarnation"], fragment), {})
            if (since := proposed.pop(event["version"], None)) is not None:
                own = self._steps.get(event["replica"])
                self.delays.add(own.between(since, event["t_s"]) if own is not None else 0)


class Waits:
    """How long outer steps have kept a replica's training thread.

    Args:
        count: how many of its waits there are.
        most: so many are drawn.
        dies: one of its incarnations has died.

    Attributes:
        every: all waits.
        lasting: those of its incarnations that have not died.
        longest: the greatest one, and when it was over.
        drawn: when they were over, and how long they were, as many as a picture shows.
    """

    def __init__(self, count: int, most: int, *, dies: bool) -> None:
        self.every = Spread()
        self.lasting = Spread() if dies else self.every
        self.longest = (-1.0, 0.0)
        self.drawn = Greatest(count, most)

    def add(self, t_s: float, stall_s: float, *, lasts: bool) -> None:
        """The next one."""
        self.every.add(stall_s)
        if lasts and self.lasting is not self.every:
            self.lasting.add(stall_s)
        self.longest = max(self.longest, (stall_s, t_s))
        self.drawn.add(t_s, stall_s)


class Sent:
    """Folds what each incarnation has sent in reductions, failed attempts included."""

    def __init__(self) -> None:
        self.totals: dict[Incarnation, int] = {}

    def add(self, event: Line) -> None:
        """A `prepare`."""
        who = (event["replica"], event["incarnation"])
        self.totals[who] = max(self.totals.get(who, 0), int(data_of(event)["wire_bytes"]))
