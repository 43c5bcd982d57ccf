"""What a first reading of a run's events finds: what is rare, held as it is, and what the second reading must know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ftopt.watch.history import History, Incarnation
from ftopt.watch.jsonl import Line
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.stream import when
from ftopt.watch.report.told import Told
from ftopt.watch.report.unsupervised import BROKE_OFF, Deaths, Recorded

COORDINATOR = "coordinator"
"""The ``replica`` of the coordinator's events."""
_HELD = frozenset(
    (
        "spawn", "started", "join", "return", "leave", "gone", "end", "death", BROKE_OFF, "start", "recover", "fault",
        "final", "promoted", "slow", "up_to_speed", "job_failed", "evaluate",
    )
)  # fmt: skip
"""Events whose lines are held: how many there are does not grow with the outer steps."""
_ATTEMPTS = 20_000
_LATE = ("refuse", "gone")
Attempt = tuple[int, int]
"""Fragment and number."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run before its outer steps are looked at.

    Attributes:
        events: those that are held, in order, with the deaths that nobody has put on record.
        deaths: what is found of these.
        history: where the job goes back.
        told: what the replicas have told the coordinator.
        unrecorded: the replicas whose inner steps are not, or not all, on record.
        replicas: all that are named, but by a refusal.
        first_s: of the first event.
        last_s: of the last one, without those that may come long after the job's end.
        waiting: the replicas that have told how long an outer step has kept them.
        attempts: when the first member began to reduce in each attempt.
        took: the attempts of each life.
    """

    events: list[Line]
    deaths: Deaths
    history: History
    told: Told
    unrecorded: list[str]
    replicas: set[str]
    first_s: float
    last_s: float
    waiting: set[str]
    attempts: Attempts
    took: Mapping[Incarnation, Attempts]

    def named(self, *names: str) -> list[Line]:
        """Its events of these names, which are some of those that are held."""
        assert _HELD.issuperset(names), names
        return [event for event in self.events if event["event"] in names]


class Attempts(dict[Attempt, float]):
    """When each was first told of; of very many, of every second one, fourth one and so on, by its number."""

    stride = 1

    def tell(self, fragment: int, number: int, t_s: float) -> None:
        if number % self.stride:
            return
        self.setdefault((fragment, number), t_s)
        while len(self) > _ATTEMPTS:
            self.stride *= 2
            for at in [at for at in self if at[1] % self.stride]:
                del self[at]


def gather(events: Iterable[Line], steps: Mapping[str, Steps]) -> Facts:
    """Reads them once, in order."""
    history, deaths, told, recorded = History(), Deaths(), Told(), Recorded()
    held: list[Line] = []
    replicas: set[str] = set()
    first_s, last_s = None, 0.0
    waiting: set[str] = set()
    attempts, took = Attempts(), dict[Incarnation, Attempts]()
    late: float | None = None
    for event in events:
        name, replica, t_s = event["event"], event["replica"], event["t_s"]
        first_s = t_s if first_s is None else min(first_s, t_s)
        if name not in _LATE:
            late = t_s if late is None else max(late, t_s)
        history.add(event)
        deaths.add(event)
        told.add(event)
        recorded.add(event)
        if name != "refuse":
            replicas.add(replica)
        if name in _HELD:
            held.append(event)
        elif name == "stall":
            waiting.add(replica)
        elif name in ("reduce", "quorum") and "attempt" in event:
            attempts.tell(event.get("fragment", 0), event["attempt"], t_s)
            if name == "reduce":
                life = took.setdefault((replica, event["incarnation"]), Attempts())
                life.tell(event.get("fragment", 0), event["attempt"], t_s)
        elif name == "reduce":
            took.setdefault((replica, event["incarnation"]), Attempts())
    deaths.close(steps)
    held = sorted([*filter(deaths.keeps, held), *deaths.found], key=when)
    history.dead = {(event["replica"], event["incarnation"]) for event in held if event["event"] == "death"}
    last_s = max([*([] if late is None else [float(late)]), *(when(event) for event in deaths.found)], default=0.0)
    replicas.discard(COORDINATOR)
    return Facts(
        events=held,
        deaths=deaths,
        history=history,
        told=told.without(steps),
        unrecorded=recorded.missing(steps),
        replicas=replicas,
        first_s=float(first_s or 0.0),
        last_s=last_s,
        waiting=waiting,
        attempts=attempts,
        took=took,
    )
