"""Deaths that nobody has put on record: those of replicas that no ``ftopt run`` has started.

An incarnation is dead if its replica has a later one, and it has neither told its end nor that it begins anew because
it was away for too long. The last that is on record of it stands for the moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftopt.report.steps import Steps
from ftopt.telemetry.jsonl import Line

Incarnation = tuple[str, int]


def deaths(events: Sequence[Line], steps: Mapping[str, Steps]) -> list[Line]:
    """Events `death` for them; none in a run of ``ftopt run``, which records deaths itself."""
    if any(event["event"] == "spawn" for event in events):
        return []
    last: dict[Incarnation, float] = {}
    over: set[Incarnation] = set()
    for event in events:
        who = (event["replica"], event["incarnation"])
        if event["event"] in ("end", "reset", "death"):
            over.add(who)
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
        if incarnation < newest[replica] and (replica, incarnation) not in over
    ]
