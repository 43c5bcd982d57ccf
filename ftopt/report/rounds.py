"""The outer steps of a run: when each was decided, whose steps it took, what it sent, how old the steps were."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from ftopt.report.run import Run
from ftopt.report.steps import Steps
from ftopt.telemetry.jsonl import Line, data_of

Position = tuple[int, int]
"""Fragment and version."""


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


def rounds(run: Run) -> list[Round]:
    """In the order of time."""
    found: dict[Position, Round] = {}
    aborted: Counter[Position] = Counter()
    prepared: dict[Position, dict[str, Line]] = defaultdict(dict)
    by_coordinator = run.decided
    for event in run.events:
        name, at = event["event"], (event.get("fragment", 0), event.get("version", 0))
        if name == "abort":
            aborted[at] += 1
        elif name == "prepare":
            prepared[at][event["replica"]] = event
        elif name == "decide":
            steps = {member[0]: member[2] for member in data_of(event)["members"]}
            found[at] = Round(*at, event["t_s"], event["inner_step"], steps)
        elif name == "commit" and not by_coordinator:
            found.setdefault(at, Round(*at, event["t_s"], event.get("inner_step", 0)))
    for at, made in found.items():
        made.aborted = aborted[at]
        made.bytes_sent = {replica: int(data_of(line)["bytes"]) for replica, line in prepared[at].items()}
        made.seconds = max((float(data_of(line)["seconds"]) for line in prepared[at].values()), default=0.0)
    return sorted(found.values(), key=lambda x: x.t_s)


def ages(run: Run) -> Counter[int]:
    """How many contributions had missed so many outer steps of their fragment since their replica's previous one."""
    last: dict[tuple[int, str, int], int] = {}
    found: Counter[int] = Counter()
    for event in run.named("decide"):
        for replica, incarnation, *_ in data_of(event)["members"]:
            who = (event.get("fragment", 0), replica, incarnation)
            found[max(0, event["version"] - last.get(who, event["version"] - 1) - 1)] += 1
            last[who] = event["version"]
    return found


def delays(run: Run) -> list[int]:
    """Of each contribution, the inner steps that its replica took from the snapshot until it applied the result."""
    proposed: dict[tuple[str, int, int, int], float] = {}
    found: list[int] = []
    for event in run.named("propose", "apply"):
        who = (event["replica"], event["incarnation"], event.get("fragment", 0), event["version"])
        if event["event"] == "propose":
            proposed[who] = event["t_s"]
        elif who in proposed:
            found.append(run.steps.get(event["replica"], Steps()).between(proposed.pop(who), event["t_s"]))
    return found


def sent(run: Run) -> dict[str, int]:
    """Replica -> bytes that its incarnations have sent in reductions, failed attempts included."""
    totals: dict[tuple[str, int], int] = {}
    for event in run.named("prepare"):
        who = (event["replica"], event["incarnation"])
        totals[who] = max(totals.get(who, 0), int(data_of(event)["wire_bytes"]))
    for who, counts in run.told.items():
        totals.setdefault(who, counts["sent"])
    found: Counter[str] = Counter()
    for (replica, _), count in totals.items():
        found[replica] += count
    return {replica: found[replica] for replica in run.replicas() if replica in found}


def stalls(run: Run, *, survivors: bool = False) -> dict[str, list[tuple[float, float]]]:
    """Replica -> (when it was over, how long its training thread was kept) of each outer step.

    Args:
        survivors: without the incarnations that died, as in ``summary.json``.
    """
    dead = {(event["replica"], event["incarnation"]) for event in run.named("death")} if survivors else set()
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in run.named("stall"):
        if (event["replica"], event["incarnation"]) not in dead:
            found[event["replica"]].append((event["t_s"], float(data_of(event)["stall_s"])))
    return dict(found)


def waits_told(run: Run) -> dict[str, float]:
    """Replica -> how long outer steps have kept its training thread in all, of those that have told only that."""
    found: dict[str, float] = defaultdict(float)
    for (replica, _), counts in run.told.items():
        found[replica] += counts["waited_s"]
    return {replica: found[replica] for replica in run.replicas() if replica in found}
