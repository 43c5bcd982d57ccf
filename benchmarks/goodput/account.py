"""What came of a job, real or simulated, in the same words: pure functions of what was recorded."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.goodput.schedule import present
from benchmarks.simulate.tally import Outcome
from benchmarks.simulate.traces import Trace
from benchmarks.speed.goodput import counted
from ftopt.watch.summary import summarize

Line = Mapping[str, Any]
_LEAST = 50
"""Of fewer steps the mean says nothing of a machine's speed."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """Of one job in one schedule.

    Args:
        goodput: samples in the model / samples that the machines present could have computed.
        committed: share of the rounds' attempts that were committed; None: no rounds.
        stall: share of the machines' time in which a training thread waited for a round; None: not recorded.
        attempts: of rounds.
        lost: steps that died with their machines, or were done again.
        others: steps that machines lost which lived on; 0 for ftopt.
    """

    goodput: float
    committed: float | None
    stall: float | None
    attempts: int | None
    lost: int
    others: int


def ours(events: Sequence[Line], steps: Mapping[str, Sequence[Line]], trace: Trace, step_s: float) -> Account:
    """Of a job of ftopt's, from its events and inner steps.

    Raises:
        AssertionError: a step of a replica that lived on is lost, or one is counted twice, or there is a fork.
    """
    summary = summarize([dict(e) for e in events], {name: [dict(x) for x in lines] for name, lines in steps.items()})
    assert not summary["chain_conflicts"], f"forks at {summary['chain_conflicts']}"
    assert not summary["inner_steps_counted_twice"], f"{summary['inner_steps_counted_twice']} steps counted twice"
    machine_s = trace.machine_seconds()
    stalls = [e["data"]["stall_s"] for e in events if e["event"] == "stall"]
    rounds, aborted = summary["outer_steps"], summary["attempts_aborted"]
    return Account(
        goodput=summary["inner_steps_committed"] * step_s / machine_s,
        committed=rounds / max(1, rounds + aborted),
        stall=sum(stalls) / machine_s,
        attempts=rounds + aborted,
        lost=summary["dead_inner_steps_lost"] + summary["inner_steps_pending"],
        others=summary["survivor_inner_steps_lost"],
    )


def simulated(found: Outcome) -> Account:
    """Of a simulation; its samples are steps. Of models of other systems too."""
    attempts = None if found.rounds is None else found.rounds + (found.aborted or 0)
    attempts = found.rounds if found.participation is None else attempts  # models count failed rounds as rounds
    good = None if attempts is None else 1 - (found.aborted or 0) / max(1, attempts)
    others = round(found.computed * (1 - found.kept))
    return Account(
        goodput=found.goodput,
        committed=good,
        stall=found.stall,
        attempts=attempts,
        lost=round(found.twice) - others,
        others=others,
    )


def torchft(
    events: Mapping[str, Sequence[Line]], trace: Trace, step_s: float, *, since_s: float, now_s: float
) -> Account:
    """Of a job of torchft's, from ``since_s`` on, in its seconds; steps that are pending at the end count as if they
    were committed."""
    work = counted(events, since_s, now_s)
    rounds = [e for lines in events.values() for e in lines if e["event"] == "round" and e["t_s"] >= since_s]
    moments = _rounds(rounds)
    machine_s = trace.machine_seconds()
    return Account(
        goodput=(work.executed - work.dead - work.lost) * step_s / machine_s,
        committed=sum(moments) / max(1, len(moments)),
        stall=sum(e["stall_s"] for e in rounds) / machine_s,
        attempts=len(moments),
        lost=work.dead,
        others=work.lost,
    )


def _rounds(lines: Sequence[Line], together_s: float = 0.5) -> list[bool]:
    """Rounds of all from those of each replica, which end at about the same time; whether any replica committed."""
    found: list[tuple[float, bool]] = []
    for e in sorted(lines, key=lambda x: float(x["t_s"])):
        if found and e["t_s"] - found[-1][0] < together_s:
            found[-1] = (found[-1][0], found[-1][1] or e["committed"])
        else:
            found.append((e["t_s"], bool(e["committed"])))
    return [committed for _, committed in found]


def restarting(
    steps: Sequence[Line],
    starts: Sequence[Line],
    trace: Trace,
    *,
    began_s: float,
    start_s: float,
    step_s: float,
) -> Account:
    """Of DDP with checkpoints: the last time that a step was done counts, for the machines that were there.

    Args:
        steps: rank 0's, in the job's seconds.
        starts: all ranks' starts.
        trace: the schedule.
        began_s: its beginning, in the job's seconds.
        start_s: from when a machine is there to when its process has started, and its samples count.
        step_s: what a step takes by itself.
    """
    trains = [x for x in starts if x["event"] == "train" and x["rank"] == 0]
    kept: dict[int, float] = {}
    again = 0
    order = sorted([*steps, *trains], key=lambda x: float(x["t_s"]))
    for line in order:
        at_s = line["t_s"] - began_s
        if at_s > trace.end_s:
            break
        if line.get("event") == "train":  # what came after the checkpoint is done again
            late = [step for step in kept if step > line["step"]]
            again += sum(present(trace, kept.pop(step), start_s) for step in late)
        elif at_s >= start_s:
            kept[line["step"]] = at_s
    samples = sum(present(trace, at_s, start_s) for at_s in kept.values())
    machine_s = trace.machine_seconds()
    return Account(
        goodput=samples * step_s / machine_s,
        committed=None,
        stall=None,
        attempts=None,
        lost=0,
        others=again,
    )


def step_of(steps: Mapping[str, Sequence[Line]], events: Sequence[Line]) -> tuple[float, float]:
    """Mean time of an inner step and the relative spread of the incarnations' means, of steps with no round between.

    The mean, since it is what a machine could compute in its time: where machines share cores, steps that wait for a
    core are part of that.

    Args:
        steps: the lines of each replica.
        events: of the job; a `stall` ends a round.
    """
    rounds: dict[str, list[float]] = defaultdict(list)
    for e in events:
        if e["event"] == "stall":
            rounds[e["replica"]].append(e["t_s"])
    everything, means = list[float](), list[float]()
    for name, lines in steps.items():
        gaps: dict[int, list[float]] = defaultdict(list)
        for a, b in itertools.pairwise(lines):
            at = bisect.bisect(rounds[name], a["t_s"])
            quiet = at == len(rounds[name]) or rounds[name][at] > b["t_s"]
            if quiet and b["local_step"] == a["local_step"] + 1 and a["incarnation"] == b["incarnation"]:
                gaps[a["incarnation"]].append(b["t_s"] - a["t_s"])
        everything += [gap for each in gaps.values() for gap in each]
        means += [statistics.fmean(each) for each in gaps.values() if len(each) >= _LEAST]
    middle = statistics.fmean(everything)
    return middle, (statistics.pstdev(means) / middle if len(means) > 1 else 0.0)


def starts_of(events: Sequence[Line], spawned: Mapping[str, Sequence[float]]) -> list[float]:
    """Seconds from the start of a process to its `join`, of those that joined. The first ones wait for each other, and
    do not count."""
    found = []
    for name, times in spawned.items():
        joins = [e["t_s"] for e in events if e["event"] == "join" and e["replica"] == name]
        for at_s, until_s in zip(times, [*times[1:], float("inf")], strict=True):
            found += [t_s - at_s for t_s in joins if at_s < t_s < until_s and at_s > times[0]][:1]
    return found


def pauses_of(starts: Sequence[Line], kills: Sequence[float]) -> list[float]:
    """Seconds from a kill to the next step of DDP's, of kills that no other kill followed before it."""
    trains = [x["t_s"] for x in starts if x["event"] == "train" and x["rank"] == 0]
    found = []
    for kill_s, next_s in itertools.pairwise([*kills, float("inf")]):
        found += [t_s - kill_s for t_s in trains if kill_s < t_s < next_s][:1]
    return found


def median_gap(steps: Sequence[Line]) -> float:
    """Of steps that follow each other, rank 0's of DDP."""
    gaps = [float(b["t_s"] - a["t_s"]) for a, b in itertools.pairwise(steps) if b["step"] == a["step"] + 1]
    return statistics.median(gaps)
