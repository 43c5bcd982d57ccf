"""What each replica was doing at each moment, folded from the events alone.

Several activities may overlap (a reduction while training goes on, a stop while it waits): each moment belongs to
exactly one state, so that a replica's states add up to the time that it is on record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ftopt.watch.decisions import Incarnation
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.lanes import Lane, Span
from ftopt.watch.report.facts import COORDINATOR, Facts
from ftopt.watch.report.lives import BROKE_OFF
from ftopt.watch.report.steps import Steps

STATES = {
    "starting": ("starting", "its process has started, and has not joined yet"),
    "standing": ("standing by", "a spare: it holds the job's state, and waits for a replica's place"),
    "training": ("training", "inner steps, evaluation, checkpoints"),
    "overlapped": ("training, reducing", "training while a reduction is under way"),
    "waiting": ("waiting", "in an outer step, for the other replicas or the result"),
    "syncing": ("syncing", "in an outer step, while the reduction is under way"),
    "fetching": ("fetching", "fetching the job's state from a peer"),
    "struck": ("stopped", "stopped, hung or cut off: by an injected fault, or since its connection was lost"),
    "dead": ("down", "from its death to the first inner step of its successor"),
}
"""State -> its label and its meaning; in the order of the legend."""

_LASTING = ("stop", "hang", "partition")


_UNCUT = 40_000
"""Maximum number of spans, for all replicas together, that are held before overlaps are cut."""
_SPANS = 12_000
"""Spans in a picture of all replicas; if there are more, neighbours become one, in the state that took most of it."""


class Timeline:
    """Folds events in order. ``silent``: the replicas whose end only `leave` reports. ``waits``: incarnations without
    a record of their own, and whether their training waits for outer steps."""

    def __init__(
        self,
        steps: Mapping[str, Steps],
        replicas: Sequence[str],
        silent: Collection[str],
        waits: Mapping[Incarnation, bool],
        end_s: float,
    ) -> None:
        self._waits = waits
        most, uncut = (max(100, most // max(1, len(replicas))) for most in (_SPANS, _UNCUT))
        self._of = {
            replica: _Underway(
                steps.get(replica, Steps()),
                end_s,
                ("end", "leave") if replica in silent else ("end",),
                Lane(most),
                uncut,
            )
            for replica in replicas
        }
        self._later: list[Line] = []  # the coordinator's: at the same time, they count after the replica's

    def add(self, event: Line) -> None:
        if self._later and event["t_s"] > self._later[0]["t_s"]:
            self._tell_all()
        if event["replica"] != COORDINATOR:
            if (own := self._of.get(event["replica"])) is not None:
                own.add(event)
        elif event["event"] in ("abort", "decide"):
            self._later.append(event)
        elif event["event"] == "quorum":
            data = data_of(event)
            for (replica, life), waited_s in zip(data["members"], data.get("waited", ()), strict=False):
                waits, own = self._waits.get((replica, life)), self._of.get(replica)
                if waits is not None and own is not None:
                    own.gathered(event, waited_s if waits else None)

    def _tell_all(self) -> None:
        for event in self._later:
            for own in self._of.values():
                own.add(event)
        self._later.clear()

    def close(self) -> dict[str, Lane]:
        """Called after the last event. Returns replica -> its states."""
        self._tell_all()
        return {replica: own.close() for replica, own in self._of.items()}


def deaths(facts: Facts, steps: Mapping[str, Steps]) -> list[tuple[Line, float | None]]:
    """Each death, or end of a record, and the first inner step of a later process of the replica (None: never); of a
    replica without steps on record, when a later one joined, or resumed as the same incarnation."""
    began: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event in facts.named("join", "return", "started"):  # in the order of time
        began[event["replica"]].append((event["t_s"], event["incarnation"]))
    found: list[tuple[Line, float | None]] = []
    for event in facts.named("death", BROKE_OFF):
        died_s, died, own = event["t_s"], event["incarnation"], steps.get(event["replica"])
        later = (t_s for t_s, incarnation in began[event["replica"]] if t_s > died_s and incarnation >= died)
        back_s = next(later, None)
        if own:
            stepped_s = own.first_after(died_s, died)
            back_s = own.first_after(back_s, died - 1) if stepped_s is None and back_s is not None else stepped_s
        found.append((event, back_s))
    return sorted(found, key=lambda x: (x[0]["t_s"], x[0]["replica"]))


class _Underway:
    """The activities of one replica: spans that may overlap, until cutting leaves one state for each moment."""

    def __init__(self, steps: Steps, end_s: float, ends: Sequence[str], lane: Lane, uncut: int) -> None:
        self._steps, self._end_s, self._ends, self._lane, self._uncut = steps, end_s, ends, lane, uncut
        self._since: dict[str, float] = {}  # what is under way now
        self._spans: list[Span] = []
        self._reducing: dict[int, tuple[int, float]] = {}  # fragment -> attempt, and since when
        self._proposed_s: float | None = None  # without a `stall` since then, which would say how long it took
        self._gathered: dict[int, float] = {}  # fragment -> since when it waits, by the coordinator's events alone
        self._trained = False
        self._died = 0.0, 0
        self._longest_s = 0.0
        self._cut_s = 0.0

    def _begin(self, name: str, t_s: float) -> None:
        self._trained = self._trained or name == "training"
        self._since.setdefault(name, t_s)

    def _stop(self, name: str, t_s: float) -> None:
        if name in self._since:
            self._spans.append(Span(self._since.pop(name), t_s, name))

    def add(self, event: Line) -> None:
        """Takes up an event of the replica, or one of the coordinator's that ends a reduction."""
        name, t_s = event["event"], float(event["t_s"])
        if name == "propose":
            self._proposed_s = t_s
        reducing = self._reducing
        for fragment in [fragment for fragment, (attempt, _) in reducing.items() if _is_over(event, fragment, attempt)]:
            self._spans.append(Span(reducing.pop(fragment)[1], t_s, "reducing"))
        if name in ("decide", "death", BROKE_OFF, *self._ends):
            self._waited([event.get("fragment", 0)] if name == "decide" else [*self._gathered], t_s)
        if event["replica"] != COORDINATOR:
            self._of_replica(event, name, t_s)
        if len(self._spans) > self._uncut:
            self._cut(t_s)

    def gathered(self, event: Line, waited_s: float | None) -> None:
        """Takes up a `quorum` event with this replica, whose training has waited for ``waited_s``; None: it goes on."""
        fragment, t_s = event.get("fragment", 0), float(event["t_s"])
        self._reducing[fragment] = event["attempt"], t_s
        if waited_s is not None:
            self._gathered.setdefault(fragment, t_s - waited_s)

    def _waited(self, fragments: Iterable[int], t_s: float) -> None:
        for since_s in [self._gathered.pop(fragment) for fragment in fragments if fragment in self._gathered]:
            self._longest_s = max(self._longest_s, t_s - since_s)
            self._spans.append(Span(since_s, t_s, "stalled"))

    def _of_replica(self, event: Line, name: str, t_s: float) -> None:
        begin, end, since, data = self._begin, self._stop, self._since, data_of(event)
        if name in ("return", "join", "over", "gone"):
            end("struck", t_s)
        if name == "spawn":
            if "standing" not in since:  # if so, the coordinator has seen it before
                begin("standing" if data.get("standby") else "starting", t_s)
        elif name == "hold" and not since.keys() & {"training", "standing"}:
            begin("starting", t_s)
        elif name == "spare":
            end("dead", t_s)
            begin("standing", t_s)
        elif name == "promoted" or (name == "leave" and "standing" in since):
            end("standing", t_s)
            if name == "leave":  # a spare reports no end of its own
                end("training", t_s)
            elif "training" not in since:
                begin("starting", t_s)
        elif (
            name in ("join", "started")
            or (name == "return" and ("dead" in since or not self._trained))  # from a checkpoint
            or (name in ("propose", "evaluate") and "training" not in since)
        ):
            end("dead", max(t_s, min(self._end_s, self._steps.first_after(*self._died) or t_s)))
            end("starting", t_s)  # also after `join`, if another machine's clock has put it there
            begin("training", t_s)
        elif name in ("death", BROKE_OFF, *self._ends):
            proposed_s = self._proposed_s
            if name not in self._ends and proposed_s is not None and not self._steps.between(proposed_s, t_s):
                self._spans.append(Span(proposed_s, t_s, "stalled"))
            self._proposed_s = None
            for what in list(since):
                end(what, t_s)
            if name == "death":
                begin("dead", t_s)
                self._died = t_s, event["incarnation"]
        elif name == "lost" and "training" in since:
            begin("struck", t_s)
        elif name == "fetch":
            begin("fetching", t_s)
        elif name in ("fetched", "fetch_failed"):
            end("fetching", t_s)
        elif name == "reduce":
            self._reducing[event.get("fragment", 0)] = event.get("attempt", 0), t_s
        elif name == "stall":
            self._proposed_s = None
            self._longest_s = max(self._longest_s, float(data["stall_s"]))
            self._spans.append(Span(t_s - float(data["stall_s"]), t_s, "stalled"))
        elif name == "fault" and data.get("do") in _LASTING and isinstance(data.get("for_s"), int | float):
            self._spans.append(Span(t_s, min(self._end_s, t_s + data["for_s"]), "struck"))

    def _cut(self, t_s: float) -> None:
        """Cuts the past; a later event about a time before the cut counts from the cut on."""
        since_s = min([t_s, *self._gathered.values(), *([] if self._proposed_s is None else [self._proposed_s])])
        until_s = since_s - self._longest_s
        if until_s <= self._cut_s:
            return
        past = [*self._spans, *(Span(since_s, t_s, name) for name, since_s in self._since.items())]
        past += [Span(since_s, t_s, "reducing") for _, since_s in self._reducing.values()]
        self._hand_on([Span(each.start, min(each.stop, until_s), each.state) for each in past])
        self._spans = [Span(max(x.start, until_s), x.stop, x.state) for x in self._spans if x.stop > until_s]
        self._since = {name: max(since_s, until_s) for name, since_s in self._since.items()}
        self._reducing = {f: (attempt, max(since_s, until_s)) for f, (attempt, since_s) in self._reducing.items()}
        self._cut_s = until_s

    def _hand_on(self, spans: Iterable[Span]) -> None:
        later = self._cut_s
        if later:
            spans = [Span(max(each.start, later), each.stop, each.state) for each in spans]
        for span in _split(each for each in spans if each.stop > each.start):
            self._lane.add(span)

    def close(self) -> Lane:
        end_s, spans = self._end_s, self._spans
        self._waited([*self._gathered], end_s)
        spans += [Span(start, end_s, name) for name, start in self._since.items()]
        spans += [Span(start, end_s, "reducing") for _, start in self._reducing.values()]
        if self._proposed_s is not None and not self._steps.between(self._proposed_s, end_s):
            spans.append(Span(self._proposed_s, end_s, "stalled"))
        if self._steps and not self._trained:
            spans.append(Span(self._steps.t_s[0], end_s, "training"))  # no coordinator's events, and no round yet
        self._hand_on(spans)
        self._lane.close()
        return self._lane


def _is_over(event: Line, fragment: int, attempt: int) -> bool:
    """Whether a reduction ends with this event of its replica or of the coordinator."""
    name = event["event"]
    if name in ("abort", "decide") and event["replica"] == COORDINATOR:
        return bool(event.get("attempt") == attempt)
    same = event.get("fragment", 0) == fragment
    return name in ("death", BROKE_OFF, "end") or (same and name in ("reduce", "commit", "fetched"))


def _split(spans: Iterable[Span]) -> Iterator[Span]:
    """Overlapping spans, cut so that each moment has one state. `Lane.add` joins neighbours of the same state."""
    edges = [edge for span in spans for edge in ((span.start, 1, span.state), (span.stop, -1, span.state))]
    now: Counter[str] = Counter()
    before = 0.0
    for t_s, change, what in sorted(edges):
        state = _state(now)
        if state is not None and t_s > before:
            yield Span(before, t_s, state)
        now[what] += change
        before = t_s


def _state(now: Mapping[str, int]) -> str | None:
    for name in ("dead", "struck", "starting", "standing", "fetching"):
        if now.get(name):
            return name
    if not now.get("training"):
        return None
    if now.get("stalled"):
        return "syncing" if now.get("reducing") else "waiting"
    return "overlapped" if now.get("reducing") else "training"
