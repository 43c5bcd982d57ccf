"""The figures of a run, computed from its events and inner-step lines by one pure function.

On each fragment every executed inner step is in exactly one place:

    executed + inherited = committed + pending + dead + discarded + survivors' lost

``executed`` counts the replicas' own lines less the steps that they have undone; ``inherited``, the steps pending in
the checkpoint that a run resumes, or in the copy of a replica that another process has replaced; ``committed``, the
coordinator's decisions; ``pending``, what each survivor reports at its end; ``dead``, the remaining steps of
incarnations that died. So ``survivor_inner_steps_lost`` is a check: it is 0 only if each step is counted once.

The folder of a single replica (``ftopt replica``), or several of them merged, have no decisions of the coordinator.
There ``committed`` is what is neither pending nor discarded (for a dead incarnation, what its last `apply` says), and
figures that could only be checked against the decisions are None.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftopt.common.spread import Spread
from ftopt.watch.decisions import Counted, Decisions, Incarnation, OwnVersions
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.samples import Ledger


def summarize(events: Iterable[Line], steps: Mapping[str, Iterable[Line]]) -> dict[str, Any]:
    """The content of ``summary.json``. ``events``: the lines of ``events.jsonl``. ``steps``: replica -> the lines of
    its file."""
    figures = Figures()
    for event in events:
        figures.add(event)
    return figures.summary(Counter((replica, x["incarnation"]) for replica, lines in steps.items() for x in lines))


_OF_THE_JOB = frozenset(("start", "recover", "decide", "quorum"))
"""The coordinator's events: with any of them, its decisions say what is committed; else the replicas' own events do."""
_HELD = ("death", "undone", "resumed", "replay", "end", "join", "return", "started", "evaluate")
_COSTS = {"copied": ("bytes", "stall_s"), "replay": ("fetch_s",), "replayed": ("steps", "seconds")}
_WHO = ("t_s", "replica", "incarnation")


class Figures:
    """Folds events in order."""

    def __init__(self) -> None:
        self._decided = self._for_a_job = False
        self.decisions, self._own, self._ledger = Decisions(), OwnVersions(), Ledger()
        self._counts: Counter[str] = Counter()
        self._held: dict[str, list[Line]] = {name: [] for name in _HELD}
        self._dropped: dict[int, dict[str, Counter[Incarnation]]] = defaultdict(
            lambda: {"nonfinite": Counter(), "mixed": Counter(), "reset": Counter()}
        )
        self._stalls: dict[Incarnation, Spread] = defaultdict(Spread)
        self._wire: dict[Incarnation, int] = {}
        self._costs: dict[str, float] = defaultdict(float)
        self._last_s: float | None = None

    def add(self, event: Line) -> None:
        name, data = event["event"], data_of(event)
        self._counts[name] += 1
        self._last_s = event["t_s"] if self._last_s is None else max(event["t_s"], self._last_s)
        self._decided = self._decided or name in _OF_THE_JOB
        self.decisions.add(event)
        self._ledger.add(event)
        if not self._decided:
            self._own.add(event)
        if (sent := data.get("wire_bytes")) is not None:
            who = _incarnation(event)
            self._wire[who] = max(self._wire.get(who, 0), int(sent))
        for wait_s, times in data.get("waits", ()):
            self._stalls[_incarnation(event)].add(wait_s, times)
        if name in self._held:
            self._held[name].append(event)
        for cost in _COSTS.get(name, ()):
            self._costs[f"{name}.{cost}"] += data[cost]
        if name == "spawn":
            self._for_a_job = self._for_a_job or "job" in data
        elif name == "stall":
            self._stalls[_incarnation(event)].add(data["stall_s"])
        elif name == "discarded":
            dropped = self._dropped[event.get("fragment", 0)]
            dropped.setdefault(data["reason"], Counter())[_incarnation(event)] += data["steps"]

    def summary(self, executed: Counter[Incarnation], *, first_alone: bool = False) -> dict[str, Any]:
        """See `summarize`. ``executed``: the inner steps that each incarnation has taken. ``first_alone``: of fragment
        0 only, since some incarnations have reported nothing of the others."""
        alone = self._for_a_job and not self._decided
        for event in self._held["undone"]:
            executed[_incarnation(event)] -= int(data_of(event)["steps"])
        inherited = _inherited([*self._held["resumed"], *self._held["replay"]])
        died, dead = self._deaths({_incarnation(event) for event in self._held["end"]})
        ends = {who: event for event in self._held["end"] if (who := _incarnation(event)) not in dead}
        spread = Spread()
        for who in self._stalls.keys() - dead:
            spread.update(self._stalls[who])
        if alone:
            died, dead = died | (unended := executed.keys() - ends.keys()), dead | unended
        decided = self.decisions.result() if not alone else {}
        fragments = sorted(decided) if not alone else self._own.fragments()
        books = [
            self._own_book(f, executed, inherited[f], ends, died)
            if alone
            else _book(f, executed, inherited[f], decided[f], self._dropped[f], ends, died)
            for f in ([0] if first_alone else fragments)
        ]
        book = books[0]
        inner_step = self._own.inner_step() if alone else decided[0].inner_step
        begun_at = max((event.get("inner_step", 0) for event in self._held["started"]), default=0)
        joins: dict[Incarnation, Line] = {}
        for event in self._held["join"]:
            joins.setdefault(_incarnation(event), event)  # a replica that reconnects does not join again
        return {
            "outer_steps": self._own.took_part() if alone else sum(each.count for each in decided.values()),
            "attempts": None if alone else self._counts["quorum"],
            "attempts_aborted": None if alone else self._counts["abort"],
            # Without any outer step: that of the checkpoint, if it resumes from one.
            "inner_step": inner_step if inner_step is not None else begun_at,
            "inner_steps_executed": executed.total(),
            "inner_steps_inherited": inherited[0].total(),
            "inner_steps_committed": book.committed,
            "inner_steps_pending": book.pending,
            "inner_steps_too_late": sum(_pending(data_of(end), 0) for end in ends.values() if _is(end, "done")),
            "survivor_inner_steps_lost": None if alone else max((b.lost for b in books), key=abs),
            "dead_inner_steps_lost": book.lost_by_dead,
            "dead_inner_steps_unreported": 0,  # these lines have all; reports know other replicas
            "inner_steps_discarded": book.discarded,
            "inner_steps_counted_twice": None if alone else max(b.twice for b in books),
            "replay": self._replay_cost(),
            "chain_conflicts": [] if alone else sorted(self.decisions.forks),
            **self._ledger.figures(),
            **_scores(self._held["evaluate"], dead),
            "anchor_digests": {
                replica: data_of(event).get("anchor_digest")
                for (replica, _), event in sorted(ends.items())
                if _is(event, "done")
            },
            "stall_s": _rounded(spread),
            "wire_bytes": sum(self._wire.values()) if self._wire else None,
            "joins": [{name: event[name] for name in _WHO} for event in joins.values()],
            "resumed": len({_incarnation(event) for event in self._held["return"]} - joins.keys()),
            "ended_before_joining": sum(_is(event, "not_joined") for event in self._held["end"]),
            "deaths": [
                {name: event[name] for name in _WHO} | {"status": data_of(event).get("status")}
                for event in self._held["death"]
                if not data_of(event).get("by")
            ],
            "killed_at_the_end": [
                {name: event[name] for name in _WHO} for event in self._held["death"] if data_of(event).get("by")
            ],
            "wall_s": 0.0 if self._last_s is None else self._last_s,
        }

    def _deaths(self, ended: set[Incarnation]) -> tuple[set[Incarnation], set[Incarnation]]:
        """The incarnations that have died, and those of them that no later process has resumed and ``ended``."""
        back_s: dict[Incarnation, float] = {}
        for event in (*self._held["return"], *self._held["resumed"]):
            who = _incarnation(event)
            back_s[who] = max(event["t_s"], back_s.get(who, -math.inf))
        deaths = [(_incarnation(event), event["t_s"]) for event in self._held["death"]]
        return {who for who, _ in deaths}, {x for x, t_s in deaths if x not in ended or t_s >= back_s.get(x, -math.inf)}

    def _own_book(
        self,
        fragment: int,
        executed: Counter[Incarnation],
        inherited: Counter[Incarnation],
        ends: Mapping[Incarnation, Line],
        died: set[Incarnation],
    ) -> _Book:
        """The same as `_book`, from what a replica reports about itself."""
        dropped, counted = self._dropped[fragment], self._own.counted(fragment)
        committed = lost_by_dead = pending = 0
        for incarnation_id in executed.keys() | inherited.keys():
            gone = sum(counts[incarnation_id] for counts in dropped.values())
            taken = executed[incarnation_id] + inherited[incarnation_id] - gone
            left = _pending(data_of(ends[incarnation_id]), fragment) if incarnation_id in ends else 0
            kept, pending = taken - left, pending + left
            if incarnation_id in died:
                lost_by_dead += kept - (kept := max(0, min(kept, counted.get(incarnation_id, 0) - gone)))
            committed += kept
        discarded = {reason: counts.total() for reason, counts in dropped.items() if reason != "reset"}
        return _Book(committed, pending, lost_by_dead + dropped["reset"].total(), discarded, 0, 0)

    def _replay_cost(self) -> dict[str, float] | None:
        """What ``recover: replay`` has saved and cost; None in a run without it.

        ``replicas`` replaced, whose ``steps`` were redone in ``seconds``; ``copies`` of ``copy_bytes`` in all, which
        kept the training threads for ``copy_s``, ``fetch_s`` for those that were used.
        """
        if not self._counts["copied"]:
            return None
        costs = self._costs
        return {
            "replicas": len(self._held["replay"]),
            "steps": int(costs["replayed.steps"]),
            "seconds": round(costs["replayed.seconds"], 4),
            "fetch_s": round(costs["replay.fetch_s"], 4),
            "copies": self._counts["copied"],
            "copy_bytes": int(costs["copied.bytes"]),
            "copy_s": round(costs["copied.stall_s"], 4),
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
    died: set[Incarnation],
) -> _Book:
    executed = executed.copy()
    executed.update(inherited)  # not +: it drops zeros and negative counts
    committed = decided.committed
    dropped = dict(dropped)
    if left := {x: steps for x, steps in decided.undone.items() if x not in died}:
        dropped["undone"] = Counter(left)
    pending = sum(_pending(data_of(event), fragment) for event in ends.values())
    lost_by_dead = dropped["reset"].total()
    for incarnation_id in died:
        lost_by_dead += executed[incarnation_id] - committed[incarnation_id]
        lost_by_dead -= _pending(data_of(ends[incarnation_id]), fragment) if incarnation_id in ends else 0
        lost_by_dead -= sum(counts[incarnation_id] for counts in dropped.values())
    discarded = {reason: counts.total() for reason, counts in dropped.items() if reason != "reset"}
    accounted = committed.total() + pending + lost_by_dead + sum(discarded.values())
    return _Book(committed.total(), pending, lost_by_dead, discarded, executed.total() - accounted, decided.twice)


def _inherited(resumed: Iterable[Line]) -> dict[int, Counter[Incarnation]]:
    """Per fragment, the uncounted inner steps that each incarnation has brought from a checkpoint or a copy."""
    found: dict[int, Counter[Incarnation]] = defaultdict(Counter)
    for event in resumed:
        for fragment, steps in enumerate(data_of(event)["pending_by_fragment"]):
            found[fragment][_incarnation(event)] = steps
    return found


def _pending(end: Line, fragment: int) -> int:
    """The pending steps of the fragment, if the replica reports them; else of fragment 0."""
    fragments: list[int] = end.get("pending_by_fragment", [])
    return int(fragments[fragment] if fragments else end.get("pending_steps", 0))


def _scores(tests: Iterable[Line], dead: set[Incarnation]) -> dict[str, Any]:
    """The scores of the first evaluation, and of the final one of the first survivor by id."""
    final = [event for event in tests if data_of(event).get("final") and _incarnation(event) not in dead]
    first = min(tests, key=lambda event: float(event["t_s"]), default=None)
    last = min(final, key=lambda event: str(event["replica"]), default=None)
    found: dict[str, Any] = {}
    for name in ("loss", "accuracy", "metrics"):
        for when, event in (("initial", first), ("final", last)):
            found[f"val_{name}_{when}"] = data_of(event).get(name) if event is not None else None
    found["val_step_initial"] = first.get("inner_step") if first is not None else None
    found["val_step_final"] = last.get("inner_step") if last is not None else None
    return found


def _rounded(values: Spread) -> dict[str, float] | None:
    if not values:
        return None
    median, p99, most = values.of()
    return {"median": round(median, 4), "p99": round(p99, 4), "max": round(most, 4)}
