"""Deaths that nobody has put on record: those of replicas that no ``ftopt run`` has started.

An incarnation is dead if its replica has a later one, or if the coordinator has lost it for good and nothing later of
its own is on record; and it has neither told its end nor that it begins anew because it was away for too long. The last
that is on record of it stands for the moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftopt.report.steps import Steps
from ftopt.telemetry.jsonl import Line, data_of

Incarnation = tuple[str, int]
_LATE_S = 1.0
"""Clocks of two machines that were aligned may still differ by so much."""


def deaths(events: Sequence[Line], steps: Mapping[str, Steps]) -> list[Line]:
    """Events `death` for them; none in a run of ``ftopt run``, which records deaths itself."""
    if any(event["event"] == "spawn" and "job" not in data_of(event) for event in events):
        return []
    last: dict[Incarnation, float] = {}
    over: set[Incarnation] = set()
    lost: dict[Incarnation, float] = {}
    for event in events:
        who = (event["replica"], event["incarnation"])
        if event["event"] in ("end", "reset", "death"):
            over.add(who)
        if event["event"] == "lost":
            lost[who] = event["t_s"]
        elif event["event"] in ("return", "leave"):
            lost.pop(who, None)
        if event["event"] in ("propose", "reduce", "commit", "apply", "stall"):  # its own words
            last[who] = max(event["t_s"], last.get(who, 0.0))
    for replica, own in steps.items():
        for t_s, incarnation in zip(own.t_s, own.incarnation, strict=True):
            last[replica, incarnation] = max(t_s, last.get((replica, incarnation), 0.0))
    newest: dict[str, int] = {}
    for replica, incarnation in last:
        newest[replica] = max(incarnation, newest.get(replica, 0))
    return [
        {
            "t_s": t_s,
            "event": "death",
            "replica": replica,
            "incarnation": incarnation,
            "data": {"status": "no end on record"},
        }
        for (replica, incarnation), t_s in last.items()
        if (replica, incarnation) not in over
        and (incarnation < newest[replica] or t_s < lost.get((replica, incarnation), 0.0) + _LATE_S)
    ]
