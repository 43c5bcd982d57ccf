"""What a campaign has come to, from what is left of it: the final models, what each process has written down, the logs.

A process *survives* if it ended in good order, not by a signal that it had no chance to answer, after the last time
that the job's state died with its holders (a restore, a rollback, a new start): every step that it finished must be in
the final model once, unless its log says how many it has dropped; the same goes for those that Ctrl-C has ended. No
process may have more in the model than it has begun.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chaos.broken import BROKEN, QUIET, VALUES
from benchmarks.chaos.facts import Facts, Outcome
from benchmarks.chaos.faults import MOST, REPLACED
from benchmarks.chaos.jobs import Run
from benchmarks.chaos.methods import WAYS
from benchmarks.chaos.script import steps_of
from benchmarks.meter import WHAT, Sizes
from ftopt.watch.jsonl import read_lines

WIPES = ("restore", "rollback", "start")
"""Events of the coordinator after which the state is another one; the first ``start`` is none."""
DAMAGED = "all, damaged checkpoint"
WIPED = "everything, no journal"
"""The fault after which no coordinator knows that there was another one."""
WHOLE = ("all", "everything", "coordinator")
"""How the names of faults begin that strike all replicas (or all but one), or the coordinator."""
BAD_EVENTS = ("fork", "mismatch", "diverged", "used_twice", "held_twice", "outlier", "evicted", "halt", "frozen")
ORDERLY = ("done", "left")
_DROPS = re.compile(
    r"([\d,]+) (?:inner |pending )*steps?(?: of fragment (\d+))? (?:are |is |were )?"
    r"(?:dropped|lost|given up|that no committed state)(?: of fragment (\d+))?"
)
_LOUD = re.compile(
    r"Traceback|never retrieved|Exception ignored|Exception in|RuntimeWarning|Fatal Python|terminate "
    r"called|Segmentation"
)
STATUS = {"": (0,), "term": (0, -15), "int": (0, 130, -2), "refused": (2,)}
"""Fate -> how the process may end; a signal may come before the script handles it. Any other fate: anyhow."""
_SLACK_S = 2.0
"""Of a stall: the machine has other work."""
_AT_WORK_S, _AROUND_S = 3.0, 1.5
_WARM, _SAMPLES_TO_JUDGE = 10, 30
GROWTH: Mapping[str, tuple[float, float]] = {
    "threads": (1.5, 16),
    "fds": (1.5, 40),
    "sockets": (1.5, 40),
    "rss_mib": (1.3, 48),
}
"""Size -> by which factor and by how much it may grow. A process that had no group in the first half of its time, since
no coordinator was there, has 24 descriptors and 9 threads more in the second. Faults come every second:
`benchmarks.soak` measures small growth."""


def judge(facts: Facts) -> Outcome:
    """Reads everything."""
    outcome = Outcome(bad=list(facts.complaints))
    events = read_lines(facts.folder / "run" / "events.jsonl")
    outcome.events = dict(Counter(e["event"] for e in events))
    ends = {run.life.number: end for run in facts.runs if (end := _end(facts.folder, run)) is not None}
    wipes = _wipes(facts, events)
    wiped = _wiped(events, wipes, facts.started, [end["at"] for end in ends.values()])
    survivors = [
        run
        for run in facts.runs
        if run.ended and (end := ends.get(run.life.number)) and end["how"] in ORDERLY and end["at"] >= wiped
    ]
    _judge_ends(facts, outcome, survivors)
    if survivors:
        model = final(WAYS[facts.way].fragments, [ends[run.life.number] for run in survivors])
        _judge_steps(facts, outcome, _answerable(ends, wiped), model)
        _judge_samples(facts, outcome, model)
    _judge_waits(facts, outcome)
    _judge_anchors(facts, outcome, wiped)
    _judge_logs(facts, outcome)
    _judge_growth(facts, outcome)
    _judge_events(facts, outcome, events, wipes)
    _judge_progress(facts, outcome, events)
    return outcome


def _wipes(facts: Facts, events: Sequence[Mapping[str, Any]]) -> list[float]:
    """When the state has become another one, in the events' time; also when replicas that have resumed brought an older
    one than was committed."""
    told, newest = list[float](), dict[int, int]()
    for e in events:
        if e["event"] == "decide":
            newest[e.get("fragment", 0)] = e["version"]
        elif e["event"] in ("start", "recover"):
            versions = dict(enumerate(e["data"]["versions"]))
            if e["event"] in WIPES or any(versions[f] < version for f, version in newest.items()):
                told.append(e["t_s"])
            newest = versions
        elif e["event"] in WIPES:
            told.append(e["t_s"])
    return sorted(told + [fault["at"] - facts.started for fault in facts.faults if fault["kind"] == WIPED])


def _judge_events(facts: Facts, outcome: Outcome, events: Sequence[Mapping[str, Any]], wipes: Sequence[float]) -> None:
    """Where all state has died, who had taken up the old one before that was known is on another branch: until it says
    so, which one that was stopped does when it goes on, and one that resumes from a checkpoint of before."""

    def is_of_before(e: Mapping[str, Any]) -> bool:
        if any(0 <= e["t_s"] - wiped < _AT_WORK_S for wiped in wipes):
            return True
        lives = [run for run in facts.runs if run.life.replica == e["replica"]]
        lives = [run for run in lives if not run.ended or run.ended - facts.started > e["t_s"]]
        let_in = [x["t_s"] for x in events if x["event"] in ("join", "return") and x["replica"] == e["replica"]]
        for run in lives if e["event"] == "fork" else ():
            began = run.began - facts.started
            resumes = run.life.resume and not any(began < t < e["t_s"] for t in let_in)
            if any(wiped < e["t_s"] and (resumes or began < wiped) for wiped in wipes):
                return True
        return False

    odd = Counter(
        e["event"] for e in events if e["event"] in BAD_EVENTS and not is_of_before(e) and not _is_told_of(facts, e)
    )
    outcome.bad += [f"{count} events {event}" for event, count in odd.items()]
    damaged = [fault["at"] - facts.started for fault in facts.faults if fault["kind"] == DAMAGED]
    for fault in facts.faults:
        at = fault["at"] - facts.started
        if fault.get("alone") and (t := _given_up(events, at, at + fault["for_s"] + _AT_WORK_S, damaged)):
            outcome.bad.append(f"the state was given up after {t:.1f} s, while {fault['who']} stood still")


def _given_up(events: Sequence[Mapping[str, Any]], begin: float, end: float, damaged: Sequence[float]) -> float:
    """When, from ``begin`` to ``end``, a version was given up that nobody else had, and no checkpoint: afterwards the
    job has gone on from an older one. 0: never, or a checkpoint was damaged in between, which may have had it."""
    newest, lost = dict[int, int](), 0.0
    for e in events:
        if e["event"] == "decide" and not lost:
            newest[e.get("fragment", 0)] = e["version"]
        elif e["event"] in WIPES and begin < e["t_s"] < end:
            lost = lost or e["t_s"]
        if e["event"] in ("start", "recover") and begin < e["t_s"]:
            versions = dict(enumerate(e["data"]["versions"]))
            if any(lost < t < e["t_s"] for t in damaged):
                return 0.0
            return lost if any(versions[f] < version for f, version in newest.items()) else 0.0
    return lost


def _is_told_of(facts: Facts, e: Mapping[str, Any]) -> bool:
    """Whether the event says that a replica computes wrong which does: all others are of one mind."""
    at = facts.started + e["t_s"]
    for fault in facts.faults:
        if fault["kind"] != VALUES or not fault["at"] <= at <= fault["at"] + fault["for_s"] + _AT_WORK_S:
            continue
        replica = fault["who"].partition(".")[0]
        others = {digest for who, digest in e.get("data", {}).get("digests", {}).items() if who != replica}
        if e["replica"] == replica or len(others) == 1:
            return True
    return False


def _end(folder: Path, run: Run) -> dict[str, Any] | None:
    path = folder / f"{run.life.name}.end"
    return json.loads(path.read_text()) if path.exists() else None


def _wiped(
    events: Sequence[Mapping[str, Any]], wipes: Sequence[float], started: float, ends: Sequence[float] = ()
) -> float:
    """When the state that the last outer step built on has come to be, or that somebody has ended with; 0: with the
    job."""
    last = max((e["t_s"] for e in events if e["event"] == "decide"), default=0.0)
    last = max(last, *(end - started for end in ends), 0.0)
    before = [t_s for t_s in wipes if t_s < last]
    return started + max(before) if len(before) > 1 else 0.0


def final(fragments: int, ends: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The final model: of each fragment the newest version. What its holder has not handed in is not in it."""
    steps, samples = [], None
    for f in range(fragments):
        newest = max(ends, key=lambda end: (end["versions"][f], -end["pending"][f]))
        steps.append(newest["model"]["steps"][f])
        samples = newest["model"]["samples"] if not f else samples
    return {"steps": steps, "samples": samples}


def _judge_ends(facts: Facts, outcome: Outcome, survivors: Sequence[Run]) -> None:
    for run in facts.runs:
        code = run.process.exitcode
        if run.ended and code not in STATUS.get(run.fate, (code,)) and not _is_turned_away(facts, run):
            outcome.bad.append(f"{run.life.name} has ended with status {code}")
    if stuck := [run.life.name for run in facts.runs if not run.ended]:
        outcome.bad.append(f"did not end: {', '.join(stuck)}")
    elif not survivors:
        outcome.bad.append("nobody has come to the end")
    else:
        began = facts.ordered or min(
            (line["at"] for run in survivors for line in lines_of(facts.folder, run) if line["what"] == "data ended"),
            default=0.0,
        )
        outcome.end_s = max(run.ended for run in facts.runs) - began if began else None
        if not began:
            outcome.bad.append("the data have not ended")


def _answerable(ends: Mapping[int, Mapping[str, Any]], wiped: float) -> set[int]:
    """Lives whose steps must be in the model or in their logs: survivors, and those that Ctrl-C has ended."""
    answers = (*ORDERLY, "interrupted")
    return {number for number, end in ends.items() if end["how"] in answers and end["at"] >= wiped}


def _is_turned_away(facts: Facts, run: Run) -> bool:
    """Whether it was started while another process of its id lived, and was told so."""
    others = [x for x in facts.runs if x.life.replica == run.life.replica and x is not run]
    met = any(x.began < (run.ended or math.inf) and (x.ended or math.inf) > run.began for x in others)
    return met and "a living replica is connected" in _log(facts, run)


def _log(facts: Facts, run: Run) -> str:
    path = facts.folder / f"{run.life.name}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def _judge_steps(facts: Facts, outcome: Outcome, alive: set[int], model: Mapping[str, Any]) -> None:
    for run in facts.runs:
        path = facts.folder / f"{run.life.name}.steps"
        begun, finished = steps_of(path) if path.exists() else (0, 0)
        outcome.steps += finished
        drops = _DROPS.findall(_log(facts, run)) if run.life.number in alive else []
        for f, steps in enumerate(model["steps"]):
            told = sum(int(count.replace(",", "")) for count, *of in drops if "".join(of) in ("", str(f)))
            outcome.told += 0 if f else told
            there = steps[run.life.number]
            if there != round(there):
                outcome.bad.append(f"{run.life.name} has {there} steps in fragment {f}")
            if _counts_samples(facts):
                continue
            if (twice := round(there) - begun) > 0:
                outcome.steps_twice += twice
                outcome.bad.append(f"{twice} steps of {run.life.name} twice in fragment {f} ({begun} begun)")
            lost = finished - round(there)
            if run.life.number in alive and lost > told:
                outcome.steps_lost += lost - told
                outcome.bad.append(f"{lost} steps of {run.life.name} lost in fragment {f}, {told} told of")
            elif run.life.number not in alive and not f:
                outcome.died += max(0, lost)


def _counts_samples(facts: Facts) -> bool:
    """With a global batch a step is the job's, and a replica's element counts micro-batches."""
    return facts.way.endswith("-batch")


def _judge_samples(facts: Facts, outcome: Outcome, model: Mapping[str, Any]) -> None:
    if not facts.samples:
        return
    found = model["samples"]
    outcome.samples_lost = sum(round(x) == 0 for x in found)
    outcome.samples_twice = sum(max(0, round(x) - 1) for x in found)
    if outcome.samples_lost or outcome.samples_twice:
        text = f"{outcome.samples_lost} samples lost, {outcome.samples_twice} twice: "
        outcome.bad.append(text + str({i: x for i, x in enumerate(found) if round(x) != 1})[:300])
    if odd := [x for x in found if abs(x - round(x)) > 1e-3]:
        outcome.bad.append(f"{len(odd)} samples in part: {odd[:5]}")


def lines_of(folder: Path, run: Run) -> list[dict[str, Any]]:
    """What the process has written down."""
    path = folder / f"{run.life.name}.jsonl"
    return read_lines(path) if path.exists() else []


def _judge_waits(facts: Facts, outcome: Outcome) -> None:
    """A stall may last as long as one incident's, times the incidents at that time; and as much longer as some process
    of the job has waited for a processor."""
    policy = facts.policy
    one = policy["dead_after_s"] + policy["grace_s"] + 0.5
    changes = [(f["at"], f["at"] + f.get("for_s", 0.0)) for f in facts.faults if f["kind"] not in BROKEN]
    changes += [(t, t) for run in facts.runs for t in (run.began, run.ended) if t]
    for run in facts.runs:
        for line in lines_of(facts.folder, run):
            if line["what"] != "wait":
                continue
            stop, start = line["at"], line["at"] - line["seconds"]
            own = sum(max(0.0, min(b, stop) - max(a, start)) for a, b in run.stops)
            waited = line["seconds"] - own
            if line["of"] == "data":
                outcome.data_wait_s = max(outcome.data_wait_s, waited)
                continue
            near = sum(begin <= stop and end >= start - one for begin, end in changes)
            allowed = (
                one * max(1, near)
                + _SLACK_S
                + _more_s(facts, start, stop)
                + max(_starved_s(each, start, stop) for each in facts.runs)
            )
            if waited > outcome.stall_s:
                outcome.stall_s, outcome.allowed_s = waited, allowed
            if waited > allowed:
                outcome.too_long += 1
                outcome.bad.append(f"{run.life.name} stood still for {waited:.1f} s, {allowed:.1f} s are allowed")


def _more_s(facts: Facts, start: float, stop: float) -> float:
    """How much longer a stall may be because of what lasts: a broken member has to be found; and a global batch waits
    for the coordinator."""
    more = 0.0
    for fault in facts.faults:
        if fault["at"] <= stop and fault["at"] + fault.get("for_s", 0.0) + _AT_WORK_S >= start:
            if fault["kind"] in BROKEN:
                more += search_s(fault["how"], facts.policy["dead_after_s"])
            elif fault["kind"] in REPLACED and _counts_samples(facts):
                more += fault["for_s"]
    return more


def search_s(how: str, dead_after_s: float) -> float:
    """How long a broken member is looked for at most: two failures, and two for each halving of `MOST` members
    (`ftopt.sync.protocol.coordinator.rounds.suspects`), with a longer pause after each. With a quiet one each failure
    takes ``dead_after_s``, and 2 s in which members see whom they cannot reach."""
    failures = 2 + 2 * math.ceil(math.log2(MOST))
    attempt_s = dead_after_s + 2.0 if how in QUIET else 0.2
    return sum(min(2.0, 0.05 * 2**n) + attempt_s for n in range(1, failures + 1))


def _starved_s(run: Run, start: float, stop: float) -> float:
    """How long the process' threads have waited for a processor around that time."""
    waited = [seconds for at, seconds in run.starved if start - _AROUND_S <= at <= stop + _AROUND_S]
    return max(waited) - min(waited) if waited else 0.0


def _judge_progress(facts: Facts, outcome: Outcome, events: Sequence[Mapping[str, Any]]) -> None:
    """Each fault may cost the job a startup. What strikes all replicas, or the coordinator, begins the wait for those
    that are away anew (docs/protocol.md); from then on, and from each outer step, the next one must come in time."""
    steps = [e["t_s"] for e in events if e["event"] == "decide"]
    outcome.idle_s = max((_quiet_s(facts, a, b) for a, b in itertools.pairwise(steps)), default=0.0)
    struck = [f["at"] + f.get("for_s", 0.0) - facts.started for f in facts.faults if f["kind"].startswith(WHOLE)]
    marks = sorted([*steps, *(t for t in struck if steps and steps[0] < t < steps[-1])])
    idle_s, since = max(((_quiet_s(facts, a, b), a) for a, b in itertools.pairwise(marks)), default=(0.0, 0.0))
    start, stop = facts.started + since, facts.started + since + idle_s
    limit = 2 * (facts.policy["evict_after_s"] + facts.policy["recovery_s"] + facts.policy["start_s"])
    limit += max((_starved_s(run, start, stop) for run in facts.runs), default=0.0)
    if idle_s > limit:
        outcome.bad.append(f"no outer step for {idle_s:.1f} s after {since:.1f} s, and nothing struck the whole job")


def _quiet_s(facts: Facts, a: float, b: float) -> float:
    """From ``a`` to ``b``, seconds since the start, without what the clock of the day was set by meanwhile."""
    return b - a - sum(by for at, by in facts.jumps if a < at - facts.started <= b + 2 * _AROUND_S)


def _judge_anchors(facts: Facts, outcome: Outcome, wiped: float) -> None:
    seen: dict[tuple[int, ...], tuple[str, str]] = {}
    for run in facts.runs:
        for line in lines_of(facts.folder, run):
            if line["what"] == "anchor" and line["at"] > wiped + _AT_WORK_S * (wiped > 0):
                first = seen.setdefault(tuple(line["versions"]), (line["digest"], run.life.name))
                if first[0] != line["digest"]:
                    outcome.unlike += 1
                    outcome.bad.append(f"{run.life.name} and {first[1]} differ at versions {line['versions']}")


def _judge_logs(facts: Facts, outcome: Outcome) -> None:
    for path in sorted(facts.folder.glob("*.log")):
        loud = [line for line in path.read_text(errors="replace").splitlines() if _LOUD.search(line)]
        outcome.loud += len(loud)
        outcome.bad += [f"{path.name}: {line[:200]}" for line in loud[:3]]


def _judge_growth(facts: Facts, outcome: Outcome) -> None:
    """What a process has held in the second half of its time, beside the first half's, by the median: while peers
    cannot be reached, groups that have failed stand for seconds beside the next ones. The first seconds, until all are
    connected, do not count."""
    held: Iterable[tuple[str, Sequence[Sizes]]] = [("coordinator", facts.coordinator)]
    for name, sizes in [*held, *((run.life.name, run.sizes) for run in facts.runs)]:
        warm = sizes[_WARM:]
        if len(warm) < _SAMPLES_TO_JUDGE:
            continue
        half = len(warm) // 2
        for what in WHAT:
            first, last = (median(getattr(s, what) for s in part) for part in (warm[:half], warm[half:]))
            factor, more = GROWTH[what]
            if last > first * factor and last > first + more:
                outcome.grown += 1
                outcome.bad.append(f"{what} of {name}: {first:g} -> {last:g}")
