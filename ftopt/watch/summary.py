"""The figures of a run, computed from its events and inner-step lines by one pure function.

On each fragment every executed inner step is in exactly one place::

    executed + inherited = committed + pending + dead + discarded + survivors' lost

``executed`` counts the replicas' own lines less the steps that they have undone, ``inherited`` what was pending in the
checkpoint that a run goes on from, or in the copy of a replica that another process has replaced, ``committed`` the
coordinator's decisions, ``pending`` what each survivor says at its end, ``dead`` the rest of the incarnations that
died. So ``survivor_inner_steps_lost`` is a check: nothing makes it 0 but each step being counted once.

The folder of a single replica (``ftopt replica``), and several of them merged, have no decisions of the coordinator.
There ``committed`` is what is neither pending nor discarded (of a dead incarnation: what its last `apply` says), and
what could only be checked with the decisions is None.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftopt.watch.decisions import Counted, Decisions, OwnVersions
from ftopt.watch.history import OF_THE_JOB, History, Incarnation
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.samples import Ledger
from ftopt.watch.spread import Spread


def summarize(
    events: Iterable[Line], steps: Mapping[str, Iterable[Line]], told: Mapping[Incarnation, int] | None = None
) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        events: the lines of ``events.jsonl``; they are read twice, and none is held.
        steps: replica -> the lines of its file.
        told: of incarnations without a file, the inner steps that they have taken; their other lines tell of fragment 0
            alone, and so does the summary then.
    """
    history = History()
    for event in events:
        history.add(event)
    figures = Figures(history)
    for event in events:
        figures.add(event)
    return figures.summary(steps, told)


class Figures:
    """Folds events in order; ``history`` has taken them up before."""

    def __init__(self, history: History) -> None:
        self._alone = history.alone
        self._decisions = Decisions(history)
        self._own = OwnVersions(history)
        self._ledger = Ledger(history)
        self._counts: Counter[str] = Counter()
        self._dead = history.dead
        self._deaths: list[dict[str, Any]] = []
        self._undone: Counter[Incarnation] = Counter()
        self._resumed: list[Line] = []
        self._replays: list[Line] = []
        self._ends: dict[Incarnation, Line] = {}
        self._not_joined = 0
        self._joins: dict[Incarnation, Line] = {}
        self._back: set[Incarnation] = set()
        self._begun_at: list[int] = []
        self._dropped: dict[int, dict[str, Counter[Incarnation]]] = defaultdict(_no_drops)
        self._first_score: Line | None = None
        self._final_scores: list[Line] = []
        self._stalls = Spread()
        self._wire: dict[Incarnation, int] = {}
        self._costs: Counter[str] = Counter()
        self._last_s: float | None = None

    def add(self, event: Line) -> None:
        """One event."""
        name, data = event["event"], data_of(event)
        self._counts[name] += 1
        if self._last_s is None or event["t_s"] > self._last_s:
            self._last_s = event["t_s"]
        if name in OF_THE_JOB:
            self._decisions.add(event)
            self._ledger.add(event)
        if self._alone:
            self._own.add(event)
        if (sent := data.get("wire_bytes")) is not None:
            who = _incarnation(event)
            self._wire[who] = max(self._wire.get(who, 0), int(sent))
        if (take := _TAKEN.get(name)) is not None:
            take(self, event, data)

    def _stall(self, event: Line, data: Line) -> None:
        if _incarnation(event) not in self._dead:
            self._stalls.add(data["stall_s"])

    def _discard(self, event: Line, data: Line) -> None:
        dropped = self._dropped[event.get("fragment", 0)]
        dropped.setdefault(data["reason"], Counter())[_incarnation(event)] += data["steps"]

    def _death(self, event: Line, data: Line) -> None:
        self._deaths.append({name: event[name] for name in _WHO} | {"status": data.get("status")})

    def _undo(self, event: Line, data: Line) -> None:
        self._undone[_incarnation(event)] += int(data["steps"])

    def _resume(self, event: Line, data: Line) -> None:
        self._resumed.append(event)

    def _end(self, event: Line, data: Line) -> None:
        self._ends[_incarnation(event)] = event
        self._not_joined += _is(event, "not_joined")

    def _join(self, event: Line, data: Line) -> None:
        self._joins.setdefault(_incarnation(event), event)  # one that reconnects does not join again

    def _return(self, event: Line, data: Line) -> None:
        self._back.add(_incarnation(event))

    def _start(self, event: Line, data: Line) -> None:
        self._begun_at = [max([*self._begun_at, event.get("inner_step", 0)])]

    def _evaluate(self, event: Line, data: Line) -> None:
        if self._first_score is None or float(event["t_s"]) < float(self._first_score["t_s"]):
            self._first_score = event
        if data.get("final"):
            self._final_scores.append(event)

    def _copied(self, event: Line, data: Line) -> None:
        self._costs["copy_bytes"] += int(data["bytes"])
        self._costs["copy_s"] += float(data["stall_s"])  # type: ignore[assignment]

    def _replay(self, event: Line, data: Line) -> None:
        self._replays.append(event)
        self._costs["fetch_s"] += float(data["fetch_s"])  # type: ignore[assignment]

    def _replayed(self, event: Line, data: Line) -> None:
        self._costs["steps"] += int(data["steps"])
        self._costs["seconds"] += float(data["seconds"])  # type: ignore[assignment]

    def summary(self, steps: Mapping[str, Iterable[Line]], told: Mapping[Incarnation, int] | None) -> dict[str, Any]:
        """See `summarize`."""
        executed = Counter((replica, line["incarnation"]) for replica, lines in steps.items() for line in lines)
        executed.update(told or {})
        for who, undone in self._undone.items():
            executed[who] -= undone
        inherited = _inherited([*self._resumed, *self._replays])
        dead, alone = set(self._dead), self._alone
        ends = {who: event for who, event in self._ends.items() if who not in dead}
        if alone:
            dead |= executed.keys() - ends.keys()
        decided = self._decisions.result() if not alone else {}
        fragments = sorted(decided) if not alone else self._own.fragments()
        books = [
            self._own_book(f, executed, inherited[f], ends, dead)
            if alone
            else _book(f, executed, inherited[f], decided[f], self._dropped[f], ends, dead)
            for f in (fragments if not told else [0])
        ]
        book = books[0]
        inner_step = self._own.inner_step() if alone else decided[0].inner_step
        scored = [event for event in self._final_scores if _incarnation(event) not in dead]
        return {
            "outer_steps": self._own.took_part() if alone else sum(each.count for each in decided.values()),
            "attempts": None if alone else self._counts["quorum"],
            "attempts_aborted": None if alone else self._counts["abort"],
            # Without any outer step that of the checkpoint, if it resumes from one.
            "inner_step": inner_step if inner_step is not None else max(self._begun_at, default=0),
            "inner_steps_executed": executed.total(),
            "inner_steps_inherited": inherited[0].total(),
            "inner_steps_committed": book.committed,
            "inner_steps_pending": book.pending,
            "inner_steps_too_late": sum(_pending(data_of(end), 0) for end in ends.values() if _is(end, "done")),
            "survivor_inner_steps_lost": None if alone else max((b.lost for b in books), key=abs),
            "dead_inner_steps_lost": book.lost_by_dead,
            "inner_steps_discarded": book.discarded,
            "inner_steps_counted_twice": None if alone else max(b.twice for b in books),
            "replay": self._replay_cost(),
            "chain_conflicts": [] if alone else sorted(self._decisions.forks),
            **self._ledger.figures(),
            **_scores(self._first_score, min(scored, key=lambda event: str(event["replica"]), default=None)),
            "anchor_digests": {
                incarnation_id[0]: data_of(event).get("anchor_digest")
                for incarnation_id, event in sorted(ends.items())
                if _is(event, "done")
            },
            "stall_s": _rounded(self._stalls),
            "wire_bytes": sum(self._wire.values()) if self._wire else None,
            "joins": [{name: event[name] for name in _WHO} for event in self._joins.values()],
            "resumed": len(self._back - self._joins.keys()),
            "ended_before_joining": self._not_joined,
            "deaths": self._deaths,
            "wall_s": 0.0 if self._last_s is None else self._last_s,
        }

    def _own_book(
        self,
        fragment: int,
        executed: Counter[Incarnation],
        inherited: Counter[Incarnation],
        ends: Mapping[Incarnation, Line],
        dead: set[Incarnation],
    ) -> _Book:
        """The same as `_book` from what a replica says of itself."""
        dropped, counted = self._dropped[fragment], self._own.counted(fragment)
        committed = lost_by_dead = pending = 0
        for incarnation_id in executed.keys() | inherited.keys():
            gone = sum(counts[incarnation_id] for counts in dropped.values())
            taken = executed[incarnation_id] + inherited[incarnation_id] - gone
            if incarnation_id in dead:
                kept = max(0, min(taken, counted.get(incarnation_id, 0) - gone))
                lost_by_dead += taken - kept
            else:
                left = _pending(data_of(ends[incarnation_id]), fragment)
                kept, pending = taken - left, pending + left
            committed += kept
        discarded = {reason: counts.total() for reason, counts in dropped.items() if reason != "reset"}
        return _Book(committed, pending, lost_by_dead + dropped["reset"].total(), discarded, 0, 0)

    def _replay_cost(self) -> dict[str, float] | None:
        """What ``recover: replay`` has saved, and what it has cost; None in a run without it.

        ``replicas`` replaced, their ``steps`` done again in ``seconds``; ``copies`` of ``copy_bytes`` in all, which
        kept the training threads for ``copy_s``, ``fetch_s`` for those that were used.
        """
        if not self._counts["copied"]:
            return None
        costs = self._costs
        return {
            "replicas": len(self._replays),
            "steps": costs["steps"],
            "seconds": round(float(costs["seconds"]), 4),
            "fetch_s": round(float(costs["fetch_s"]), 4),
            "copies": self._counts["copied"],
            "copy_bytes": costs["copy_bytes"],
            "copy_s": round(float(costs["copy_s"]), 4),
        }


_WHO = ("t_s", "replica", "incarnation")
_TAKEN = {
    "stall": Figures._stall,
    "discarded": Figures._discard,
    "death": Figures._death,
    "undone": Figures._undo,
    "resumed": Figures._resume,
    "end": Figures._end,
    "join": Figures._join,
    "return": Figures._return,
    "started": Figures._start,
    "evaluate": Figures._evaluate,
    "copied": Figures._copied,
    "replay": Figures._replay,
    "replayed": Figures._replayed,
}


def _incarnation(event: Line) -> Incarnation:
    return event["replica"], event["incarnation"]


def _is(end: Line, reason: str) -> bool:
    return data_of(end).get("reason") == reason


@dataclass(frozen=True, slots=True)
class _Book:
    """Where the executed inner steps are, on one fragment; ``lost`` is what cannot be found."""

    committed: int
    pending: int
    lost_by_dead: int
    discarded: dict[str, int]
    lost: int
    twice: int


def _book(
    fragment: int,
    executed: Counter[Incarnation],
    inherited: Counter[Incarnation],
    decided: Counted,
    dropped: Mapping[str, Counter[Incarnation]],
    ends: Mapping[Incarnation, Line],
    dead: set[Incarnation],
) -> _Book:
    executed = executed.copy()
    executed.update(inherited)  # not +: zeros and less than that are kept
    committed = decided.committed
    dropped = dict(dropped)
    if left := {x: steps for x, steps in decided.undone.items() if x not in dead}:
        dropped["undone"] = Counter(left)
    pending = sum(_pending(data_of(event), fragment) for event in ends.values())
    lost_by_dead = dropped["reset"].total()
    for incarnation_id in dead:
        lost_by_dead += executed[incarnation_id] - committed[incarnation_id]
        lost_by_dead -= sum(counts[incarnation_id] for counts in dropped.values())
    discarded = {reason: counts.total() for reason, counts in dropped.items() if reason != "reset"}
    accounted = committed.total() + pending + lost_by_dead + sum(discarded.values())
    return _Book(committed.total(), pending, lost_by_dead, discarded, executed.total() - accounted, decided.twice)


def _inherited(resumed: Iterable[Line]) -> dict[int, Counter[Incarnation]]:
    """Per fragment, the inner steps that each incarnation has brought from a checkpoint, or a copy, uncounted."""
    found: dict[int, Counter[Incarnation]] = defaultdict(Counter)
    for event in resumed:
        for fragment, steps in enumerate(data_of(event)["pending_by_fragment"]):
            found[fragment][_incarnation(event)] = steps
    return found


def _pending(end: Line, fragment: int) -> int:
    """Of the fragment, if the replica says so; else of fragment 0."""
    fragments: list[int] = end.get("pending_by_fragment", [])
    return int(fragments[fragment] if fragments else end.get("pending_steps", 0))


def _no_drops() -> dict[str, Counter[Incarnation]]:
    return {"nonfinite": Counter(), "mixed": Counter(), "reset": Counter()}


def _scores(first: Line | None, last: Line | None) -> dict[str, Any]:
    """Of the first evaluation, and of the final one of the first survivor in the order of ids."""
    found: dict[str, Any] = {}
    for name in ("loss", "accuracy", "metrics"):
        found[f"val_{name}_initial"] = data_of(first).get(name) if first is not None else None
        found[f"val_{name}_final"] = data_of(last).get(name) if last is not None else None
    found["val_step_initial"] = first.get("inner_step") if first is not None else None
    found["val_step_final"] = last.get("inner_step") if last is not None else None
    return found


def _rounded(values: Spread) -> dict[str, float] | None:
    if not values:
        return None
    median, p99, most = values.of()
    return {"median": round(median, 4), "p99": round(p99, 4), "max": round(most, 4)}
