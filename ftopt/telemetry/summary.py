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

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftopt.telemetry.jsonl import Line, data_of
from ftopt.telemetry.samples import count_samples

Incarnation = tuple[str, int]
"""A replica and the number of its incarnation."""


def summarize(
    events: Sequence[Line], steps: Mapping[str, Sequence[Line]], told: Mapping[Incarnation, int] | None = None
) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        events: the lines of ``events.jsonl``.
        steps: replica -> the lines of its file.
        told: of incarnations without a file, the inner steps that they have taken; their other lines tell of fragment 0
            alone, and so does the summary then.
    """
    by_name: dict[str, list[Line]] = defaultdict(list)
    for event in events:
        by_name[event["event"]].append(event)
    dead = {_incarnation(event) for event in by_name["death"]}
    decisions, conflicts, undone = _decisions(events)
    executed = Counter((replica, line["incarnation"]) for replica, lines in steps.items() for line in lines)
    executed.update(told or {})
    for event in by_name["undone"]:
        executed[_incarnation(event)] -= int(data_of(event)["steps"])
    inherited = _inherited([*by_name["resumed"], *by_name["replay"]])
    survivors_end = {_incarnation(event): event for event in by_name["end"] if _incarnation(event) not in dead}
    decided = any(by_name[name] for name in ("start", "recover", "quorum", "decide"))  # the coordinator's are there
    alone = not decided and any("job" in data_of(event) for event in by_name["spawn"])  # of `ftopt replica`
    if alone:
        by_name["apply"] = _standing([*by_name["started"], *by_name["apply"]])
        decisions = _applied(by_name["apply"])
        dead |= executed.keys() - survivors_end.keys()
    books = [
        _book(f, executed, inherited[f], decisions[f].values(), by_name["discarded"], survivors_end, dead, undone[f])
        if not alone
        else _own_book(f, executed, inherited[f], by_name, survivors_end, dead)
        for f in (sorted(decisions) if not told else [0])
    ]
    book = books[0]
    joins: dict[Incarnation, Line] = {}
    for event in by_name["join"]:  # the first of each incarnation: one that reconnects does not join again
        joins.setdefault(_incarnation(event), event)
    back = {_incarnation(event) for event in by_name["return"]}
    last = max(decisions[0].values(), key=lambda event: int(event["version"]), default=None)
    return {
        "outer_steps": sum(map(len, decisions.values()))
        if not alone
        else _took_part(decisions, by_name["commit"], by_name["fetched"]),
        "attempts": None if alone else len(by_name["quorum"]),
        "attempts_aborted": None if alone else len(by_name["abort"]),
        "inner_step": last["inner_step"] if last is not None else _begun_at(by_name["started"]),
        "inner_steps_executed": executed.total(),
        "inner_steps_inherited": inherited[0].total(),
        "inner_steps_committed": book.committed,
        "inner_steps_pending": book.pending,
        "inner_steps_too_late": sum(_pending(data_of(end), 0) for end in survivors_end.values() if _is(end, "done")),
        "survivor_inner_steps_lost": None if alone else max((b.lost for b in books), key=abs),
        "dead_inner_steps_lost": book.lost_by_dead,
        "inner_steps_discarded": book.discarded,
        "inner_steps_counted_twice": None if alone else max(b.twice for b in books),
        "replay": _replay(by_name),
        "chain_conflicts": conflicts,
        **count_samples(events),
        **_scores(by_name["evaluate"], dead),
        "anchor_digests": {
            incarnation_id[0]: data_of(event).get("anchor_digest")
            for incarnation_id, event in sorted(survivors_end.items())
            if _is(event, "done")
        },
        "stall_s": _spread([data_of(x)["stall_s"] for x in by_name["stall"] if _incarnation(x) not in dead]),
        "wire_bytes": _wire_bytes(events),
        "joins": [{name: event[name] for name in ("t_s", "replica", "incarnation")} for event in joins.values()],
        "resumed": len(back - joins.keys()),
        "ended_before_joining": sum(_is(event, "not_joined") for event in by_name["end"]),
        "deaths": [
            {name: event[name] for name in ("t_s", "replica", "incarnation")} | {"status": data_of(event).get("status")}
            for event in by_name["death"]
        ],
        "wall_s": max((event["t_s"] for event in events), default=0.0),
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
    decisions: Iterable[Line],
    discards: Iterable[Line],
    ends: Mapping[Incarnation, Line],
    dead: set[Incarnation],
    undone: Counter[Incarnation],
) -> _Book:
    executed = executed.copy()
    executed.update(inherited)  # not +: zeros and less than that are kept
    committed, twice = _committed(decisions)
    dropped = _discarded(event for event in discards if event.get("fragment", 0) == fragment)
    if left := {x: steps for x, steps in undone.items() if x not in dead}:
        dropped["undone"] = Counter(left)
    pending = sum(_pending(data_of(event), fragment) for event in ends.values())
    lost_by_dead = dropped["reset"].total()
    for incarnation_id in dead:
        lost_by_dead += executed[incarnation_id] - committed[incarnation_id]
        lost_by_dead -= sum(counts[incarnation_id] for counts in dropped.values())
    discarded = {reason: counts.total() for reason, counts in dropped.items() if reason != "reset"}
    accounted = committed.total() + pending + lost_by_dead + sum(discarded.values())
    return _Book(committed.total(), pending, lost_by_dead, discarded, executed.total() - accounted, twice)


def _own_book(
    fragment: int,
    executed: Counter[Incarnation],
    inherited: Counter[Incarnation],
    by_name: Mapping[str, list[Line]],
    ends: Mapping[Incarnation, Line],
    dead: set[Incarnation],
) -> _Book:
    """The same from what a replica says of itself."""
    dropped = _discarded(event for event in by_name["discarded"] if event.get("fragment", 0) == fragment)
    counted = {
        _incarnation(event): int(data_of(event).get("counted_step", 0))
        for event in by_name["apply"]
        if event.get("fragment", 0) == fragment
    }
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


def _standing(events: Iterable[Line]) -> list[Line]:
    """The events `apply` without those of versions that were rolled back: a later incarnation of the replica has
    started from an earlier version."""
    found: dict[tuple[str, int], list[Line]] = defaultdict(list)
    for event in sorted(events, key=lambda event: int(event["incarnation"])):  # stays as it was within each
        known = found[event["replica"], event.get("fragment", 0)]
        if known and known[-1]["incarnation"] < event["incarnation"] and "version" in event:
            known[:] = [former for former in known if former["version"] <= event["version"]]
        if event["event"] == "apply":
            known.append(event)
    return [event for known in found.values() for event in known]


def _applied(events: Iterable[Line]) -> dict[int, dict[int, Line]]:
    """Fragment -> version -> the committed state that a replica has followed, as `_decisions` has it."""
    found: dict[int, dict[int, Line]] = {0: {}}
    for event in events:
        known = found.setdefault(event.get("fragment", 0), {})
        known[event["version"]] = {**event, "inner_step": data_of(event).get("committed_step", 0), "data": {}}
    return found


def _took_part(decisions: Mapping[int, Mapping[int, Line]], commits: Iterable[Line], fetched: Iterable[Line]) -> int:
    """How many of the committed states the replica has helped to make; the others it has fetched."""
    made = {(event.get("fragment", 0), event.get("version")) for event in commits}
    got = {(event.get("fragment", 0), event.get("version")) for event in fetched} - made
    return sum((fragment, version) not in got for fragment, known in decisions.items() for version in known)


def _inherited(resumed: Iterable[Line]) -> dict[int, Counter[Incarnation]]:
    """Per fragment, the inner steps that each incarnation has brought from a checkpoint, or a copy, uncounted."""
    found: dict[int, Counter[Incarnation]] = defaultdict(Counter)
    for event in resumed:
        for fragment, steps in enumerate(data_of(event)["pending_by_fragment"]):
            found[fragment][_incarnation(event)] = steps
    return found


def _replay(by_name: Mapping[str, list[Line]]) -> dict[str, float] | None:
    """What ``recover: replay`` has saved, and what it has cost; None in a run without it.

    ``replicas`` replaced, their ``steps`` done again in ``seconds``; ``copies`` of ``copy_bytes`` in all, which kept
    the training threads for ``copy_s``, ``fetch_s`` for those that were used.
    """
    copied = [data_of(event) for event in by_name["copied"]]
    if not copied:
        return None
    replays, ended = ([data_of(event) for event in by_name[name]] for name in ("replay", "replayed"))
    return {
        "replicas": len(replays),
        "steps": sum(int(data["steps"]) for data in ended),
        "seconds": round(sum(float(data["seconds"]) for data in ended), 4),
        "fetch_s": round(sum(float(data["fetch_s"]) for data in replays), 4),
        "copies": len(copied),
        "copy_bytes": sum(int(data["bytes"]) for data in copied),
        "copy_s": round(sum(float(data["stall_s"]) for data in copied), 4),
    }


def _pending(end: Line, fragment: int) -> int:
    """Of the fragment, if the replica says so; else of fragment 0."""
    fragments: list[int] = end.get("pending_by_fragment", [])
    return int(fragments[fragment] if fragments else end.get("pending_steps", 0))


def _decisions(
    events: Iterable[Line],
) -> tuple[dict[int, dict[int, Line]], list[int], Mapping[int, Counter[Incarnation]]]:
    """The decisions that stand: fragment -> version -> decision; the versions of any fragment that were decided with
    more than one chain: a fork; and fragment -> steps that were in decisions that do not stand, of incarnations that
    had left by then (others contribute them again).

    A coordinator that was killed after it had journalled a decision may not have told it: the next one does when it
    begins (`recover`). The last word counts. A rollback takes back those that the job does not go on from: they are
    made again.
    """
    found: dict[int, dict[int, Line]] = {0: {}}
    forks: set[int] = set()
    undone: dict[int, Counter[Incarnation]] = defaultdict(Counter)
    left: set[Incarnation] = set()
    rolled_back = False

    def take(event: Line, chain: str) -> None:
        known = found.setdefault(event.get("fragment", 0), {})
        version = event["version"]
        if version in known and data_of(known[version]).get("chain", "") != chain:
            forks.add(version)
        known[version] = event

    for event in events:
        if event["event"] == "decide":
            take(event, data_of(event).get("chain", ""))
        elif event["event"] == "rollback":
            rolled_back = True
        elif event["event"] == "leave":
            left.add(_incarnation(event))
        elif event["event"] in ("start", "recover") and rolled_back:
            rolled_back = False
            for fragment, last in enumerate(data_of(event).get("versions", ())):
                known = found.get(fragment, {})
                found[fragment] = {version: event for version, event in known.items() if version <= last}
                for replica, incarnation, steps, *_, finite in _members(known.keys() - found[fragment].keys(), known):
                    if finite and (replica, incarnation) in left:
                        undone[fragment][replica, incarnation] += steps
        for last in data_of(event).get("decided", ()) if event["event"] == "recover" else ():
            take({**last, "data": last}, last["chain"])
    return found, sorted(forks), undone


def _members(versions: Iterable[int], decisions: Mapping[int, Line]) -> Iterator[list[Any]]:
    """Those of these versions' decisions."""
    return (member for version in versions for member in data_of(decisions[version])["members"])


def _committed(decisions: Iterable[Line]) -> tuple[Counter[Incarnation], int]:
    """Committed inner steps of each incarnation, and how many of all were counted before."""
    committed: Counter[Incarnation] = Counter()
    last: dict[Incarnation, int] = {}
    twice = 0
    for decision in sorted(decisions, key=lambda event: int(event["version"])):
        for replica, incarnation, steps, last_step, _weight, finite in data_of(decision)["members"]:
            incarnation_id = (replica, incarnation)
            if finite:  # also of a share of a global batch without samples
                committed[incarnation_id] += steps
                twice += max(0, steps - (last_step - last.get(incarnation_id, 0)))
            last[incarnation_id] = max(last_step, last.get(incarnation_id, 0))
    return committed, twice


def _begun_at(started: Iterable[Line]) -> int:
    """The job's inner step without any outer step: that of the checkpoint, if it resumes from one."""
    return max((event.get("inner_step", 0) for event in started), default=0)


def _discarded(events: Iterable[Line]) -> dict[str, Counter[Incarnation]]:
    dropped: dict[str, Counter[Incarnation]] = {"nonfinite": Counter(), "mixed": Counter(), "reset": Counter()}
    for event in events:
        dropped.setdefault(data_of(event)["reason"], Counter())[_incarnation(event)] += data_of(event)["steps"]
    return dropped


def _scores(events: Sequence[Line], dead: set[Incarnation]) -> dict[str, Any]:
    """Of the first evaluation, and of the final one of the first survivor in the order of ids."""
    final = [event for event in events if data_of(event).get("final") and _incarnation(event) not in dead]
    first = min(events, key=lambda event: float(event["t_s"]), default=None)
    last = min(final, key=lambda event: str(event["replica"]), default=None)
    found: dict[str, Any] = {}
    for name in ("loss", "accuracy", "metrics"):
        found[f"val_{name}_initial"] = data_of(first).get(name) if first is not None else None
        found[f"val_{name}_final"] = data_of(last).get(name) if last is not None else None
    found["val_step_initial"] = first.get("inner_step") if first is not None else None
    found["val_step_final"] = last.get("inner_step") if last is not None else None
    return found


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return {"median": round(statistics.median(ordered), 4), "p99": round(p99, 4), "max": round(ordered[-1], 4)}


def _wire_bytes(events: Iterable[Line]) -> int | None:
    """What each incarnation sent over the wire, in all; each says its running total."""
    totals: dict[Incarnation, int] = {}
    for event in events:
        sent = data_of(event).get("wire_bytes")
        if sent is not None:
            totals[_incarnation(event)] = max(totals.get(_incarnation(event), 0), int(sent))
    return sum(totals.values()) if totals else None
