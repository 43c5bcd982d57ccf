"""Deaths of replicas that no `ftopt run` has started, and that nobody has therefore put on record when they happened.

An incarnation has died if its replica has a later one, or if the coordinator has lost it for good and nothing later of
its own is on record; and it has neither told its end nor that it starts again from the job's state. It died
when the coordinator lost its connection, or, where it has told something later than that, at the last that is on record
of it. What the next incarnation has written of its death bears that incarnation's time, and is left out. The replica
of a script writes nothing: all there is then is what the coordinator says of it, that it has joined, left or been lost.

Without the coordinator's events nobody knows whether it has died: all that is told then is that its record breaks off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftopt.report.steps import Steps
from ftopt.telemetry.jsonl import Line, data_of

Incarnation = tuple[str, int]
BROKE_OFF = "broke_off"
"""The event in the place of `death` where the coordinator's are not there; no process emits it."""
_STATUS = "killed, crashed or cut off"
_LATE_S = 1.0
"""Clocks of two machines that were aligned may still differ by so much."""
_OWN_WORDS = frozenset(
    ("spawn", "started", "propose", "reduce", "commit", "apply", "stall", "fetch", "fetched", "evaluate")
)
"""Events that a replica alone emits."""


def with_deaths(events: Sequence[Line], steps: Mapping[str, Steps]) -> list[Line]:
    """The events with a `death`, or `BROKE_OFF`, for each of them; as they are in a run of ``ftopt run``."""
    if any(event["event"] == "spawn" and "job" not in data_of(event) for event in events):
        return [*events]
    kept = [event for event in events if not _is_guess(event)]
    last: dict[Incarnation, float] = {}
    over: set[Incarnation] = set()
    left: set[Incarnation] = set()
    lost: dict[Incarnation, float] = {}
    back: dict[Incarnation, tuple[float, float]] = {}  # when it was lost, and when it came back
    joined: dict[Incarnation, float] = {}
    for event in kept:
        who = (event["replica"], event["incarnation"])
        if event["event"] in ("end", "reset", "over", "death"):
            over.add(who)
        if event["event"] in ("join", "return"):
            joined.setdefault(who, event["t_s"])
        if event["event"] == "lost":
            lost_s, back_s = back.get(who, (0.0, -_LATE_S))
            # Back for a moment: another process has claimed it, out of a checkpoint, and was given the next one.
            lost[who] = lost_s if event["t_s"] < back_s + _LATE_S else event["t_s"]
        elif event["event"] in ("return", "leave") and who in lost:
            back[who] = lost.pop(who), event["t_s"]
        if event["event"] == "leave":
            left.add(who)
        if event["event"] in _OWN_WORDS:
            last[who] = max(event["t_s"], last.get(who, 0.0))
    trained: set[Incarnation] = set()
    for replica, own in steps.items():
        for t_s, incarnation in zip(own.t_s, own.incarnation, strict=True):
            last[replica, incarnation] = max(t_s, last.get((replica, incarnation), 0.0))
            trained.add((replica, incarnation))
    last = {**joined, **last}
    over |= left - trained  # a spare tells no end of its own
    newest: dict[str, int] = {}
    for replica, incarnation in last:
        newest[replica] = max(incarnation, newest.get(replica, 0))
    decided = any(event["event"] in ("start", "recover", "decide", "quorum") for event in kept)
    told = [
        {
            "t_s": lost[who] if t_s < lost.get(who, 0.0) + _LATE_S and who in lost else t_s,
            "event": "death" if decided else BROKE_OFF,
            "replica": who[0],
            "incarnation": who[1],
            "data": {"status": _STATUS},
        }
        for who, t_s in last.items()
        if who not in over and who[1] > 0 and (who[1] < newest[who[0]] or (who in lost and t_s < lost[who] + _LATE_S))
    ]
    return [*kept, *told]


def unrecorded(events: Sequence[Line], steps: Mapping[str, Steps]) -> list[str]:
    """The replicas whose inner steps are not, or not all, on record, although the coordinator names them: those of
    scripts, which write no folder, and those whose folder was not given."""
    named: dict[str, set[Incarnation]] = {"decide": set(), "join": set()}
    heard = {(replica, incarnation) for replica, own in steps.items() for incarnation in set(own.incarnation)}
    for event in events:
        if event["event"] == "decide":
            named["decide"].update((member[0], member[1]) for member in data_of(event)["members"] if member[2])
        elif event["event"] == "join":
            named["join"].add((event["replica"], event["incarnation"]))
        elif event["event"] in _OWN_WORDS:
            heard.add((event["replica"], event["incarnation"]))
    missing = named["decide"] - heard if heard else named["decide"] | named["join"]
    return sorted({replica for replica, _ in missing})


def _is_guess(event: Line) -> bool:
    """Whether it is of an earlier reading, or of the next incarnation."""
    status = data_of(event).get("status") if event["event"] == "death" else None
    return event["event"] == BROKE_OFF or status in (_STATUS, "unknown")
