"""The first reading of a run's events: it holds rare ones as they are, and finds what the second reading must know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ftopt.watch.decisions import Incarnation
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.report.lives import BROKE_OFF, Lives
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.stream import when

COORDINATOR = "coordinator"
"""The ``replica`` of the coordinator's events."""
_HELD = frozenset(
    (
        "spawn", "started", "join", "return", "lost", "leave", "gone", "end", "death", BROKE_OFF, "start", "recover",
        "fault", "final", "promoted", "slow", "up_to_speed", "job_failed", "evaluate", "interrupted",
    )
)  # fmt: skip
"""Events whose lines are held: their number does not grow with the outer steps."""
_ATTEMPTS = 20_000
_LATE = ("refuse", "gone")
Attempt = tuple[int, int]
"""Fragment and number."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a run that are known before its outer steps are read. ``events``: the held ones in order, with
    the deaths that nobody recorded. ``last_s``: of events that may come long after the job's end, none counts.
    ``waiting``: the replicas with a `stall`. ``attempts``: when the first member began to reduce. ``took``: who took
    part in which. ``saved``: a checkpoint is known."""

    events: list[Line]
    lives: Lives
    decided: bool
    dead: set[Incarnation]
    unrecorded: list[str]
    replicas: set[str]
    first_s: float
    last_s: float
    waiting: set[str]
    attempts: Attempts
    took: Mapping[Incarnation, Attempts]
    saved: bool

    def named(self, *names: str) -> list[Line]:
        """The events with these names, which must be among those that are held."""
        assert _HELD.issuperset(names), names
        return [event for event in self.events if event["event"] in names]


class Attempts(dict[Attempt, float]):
    """When each attempt was first reported; if there are very many, only every second one, fourth one and so on."""

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
    """Reads the events once, in order."""
    lives, held = Lives(), list[Line]()
    replicas, waiting = set[str](), set[str]()
    attempts, took = Attempts(), dict[Incarnation, Attempts]()
    moments, last_s, saved = list[float](), -1.0e11, False
    for event in events:
        name, replica, t_s = event["event"], event["replica"], float(event["t_s"])
        moments[1:] = [t_s]
        if name not in _LATE:
            last_s = max(last_s, t_s)
        lives.add(event)
        saved = saved or name in ("checkpoint", "resumed", "restore") or bool(data_of(event).get("resumed"))
        if name != "refuse":
            replicas.add(replica)
        if name in _HELD:
            held.append(event)
        elif name == "stall":
            waiting.add(replica)
        elif name in ("reduce", "quorum") and "attempt" in event:
            known = [attempts]
            if name == "reduce":
                known.append(took.setdefault((replica, event["incarnation"]), Attempts()))
            for each in known:
                each.tell(event.get("fragment", 0), event["attempt"], t_s)
    lives.close(steps)
    held = sorted([*filter(lives.keeps, held), *lives.found], key=when)
    replicas.discard(COORDINATOR)
    return Facts(
        events=held,
        lives=lives,
        decided=lives.decided,
        dead={(event["replica"], event["incarnation"]) for event in held if event["event"] == "death"},
        unrecorded=lives.unrecorded(),
        replicas=replicas,
        first_s=moments[0] if moments else 0.0,
        last_s=max([last_s, *map(when, lives.found)]) if last_s > -1.0e11 or lives.found else 0.0,
        waiting=waiting,
        attempts=attempts,
        took=took,
        saved=saved,
    )
