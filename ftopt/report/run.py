"""One run, with what is known of it; `ftopt.report.record` reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftopt.errors import UserError
from ftopt.plural import natural
from ftopt.report.steps import Steps
from ftopt.report.told import as_recorded, is_complete, told
from ftopt.telemetry.jsonl import Line
from ftopt.telemetry.summary import summarize

COORDINATOR = "coordinator"
"""The ``replica`` of the coordinator's events."""
_GOING_ON_S = 60.0
"""A run without a summary whose last line is younger than this is taken for one that is still going on."""


@dataclass(slots=True)
class Run:
    """One run, or what several machines have recorded of one.

    Args:
        name: its folder's name, with the job's where the folder has several.
        job: its name, as far as the folder tells; None: it does not.
        folders: where it was read from; several if they were merged.
        events: in the order of time.
        steps: replica -> its inner steps.
        summary: `summarize`'s figures, as ``summary.json`` has them; None for what ``unrecorded`` leaves unknown, as
            far as these have not told it either.
        summarized: there is a ``summary.json``: `ftopt run` has come to its end.
        recipe: the text of ``recipe.yaml``.
        about: when it began, versions; of ``about.json``.
        skipped: lines that could not be read.
        age_s: seconds since its last line was written.
        unrecorded: the replicas whose inner steps are not, or not all, on record, although the coordinator names them.
        notes: what a reader must know of how it was read.
    """

    name: str
    job: str | None
    folders: list[Path]
    events: list[Line]
    steps: dict[str, Steps]
    summary: dict[str, Any]
    summarized: bool
    recipe: str | None
    about: dict[str, Any]
    skipped: int
    age_s: float
    unrecorded: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Nothing more comes: it was summarized, or each replica has told its end."""
        return self.summarized or bool((self.steps or self.named("leave")) and not self.without_end())

    def without_end(self) -> list[str]:
        """The replicas whose record does not come to their end."""
        told: set[str] = set()
        for event in self.named("end", "spawn"):  # one that is started again goes on in its folder
            (told.add if event["event"] == "end" else told.discard)(event["replica"])
        there: set[str] = set()  # as the coordinator sees it
        for event in self.named("join", "return", "leave", "gone"):
            (there.add if event["event"] in ("join", "return") else there.discard)(event["replica"])
        silent = set(self.unrecorded) - there  # has left, or died
        return [replica for replica in self.replicas() if replica not in told | silent]

    @property
    def told(self) -> dict[tuple[str, int], Line]:
        """What incarnations without a record of their own have told the coordinator of their lives."""
        return told(self.events, self.steps)

    @property
    def partly(self) -> bool:
        """Whether it is not known how many inner steps were taken: somebody has neither recorded nor told it."""
        return self.summary["inner_steps_executed"] is None

    @property
    def going_on(self) -> bool:
        return not self.ended and self.age_s < _GOING_ON_S

    @property
    def loss_unit(self) -> str:
        """`` nats`` for the built-in cross-entropy; "" for a loss of the user's own, whose unit is not known."""
        own = self.recipe is None or re.search(r"^task:\n +name: (?!cross_entropy)", self.recipe, re.MULTILINE)
        return "" if own else " nats"

    @property
    def decided(self) -> bool:
        """The coordinator's events are there, and with them who contributed what."""
        return any(event["event"] in ("start", "recover", "decide", "quorum") for event in self.events)

    @property
    def end_s(self) -> float:
        """When the last thing was recorded. Long after the job's end a replica may come, and be refused or given up."""
        last = max((steps.t_s[-1] for steps in self.steps.values() if steps), default=0.0)
        late = ("refuse", "gone")
        return max(last, next((float(x["t_s"]) for x in reversed(self.events) if x["event"] not in late), 0.0))

    def replicas(self) -> list[str]:
        """All that ever were there, in the order of their names, numbers in them as numbers; one that was only refused
        was not."""
        told = {event["replica"] for event in self.events if event["event"] != "refuse"} - {COORDINATOR}
        return sorted(told | set(self.steps), key=natural)

    def named(self, *names: str) -> list[Line]:
        """Its events of these names."""
        return [event for event in self.events if event["event"] in names]


def figures(events: Sequence[Line], steps: dict[str, Steps], silent: Sequence[str], path: Path) -> dict[str, Any]:
    """`summarize`, of what has been read; None for what the ``silent``, `unrecorded` replicas have not told either."""
    lines = {replica: [_INCARNATION[i] for i in x.incarnation] for replica, x in steps.items()}
    more, taken = as_recorded(events, steps)
    try:
        found = summarize([*events, *more], lines, taken)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: its events are not those of an ftopt run ({type(error).__name__}: {error}); "
            "give the folder of a run as `ftopt run` has written it"
        ) from error
    return found if is_complete(events, steps, silent) else found | dict.fromkeys(_BY_REPLICAS)


_BY_REPLICAS = ("inner_steps_executed", "inner_steps_pending", "dead_inner_steps_lost", "survivor_inner_steps_lost")
"""Figures that are not known without every replica's own record."""


def ordered(events: Iterable[Line]) -> list[Line]:
    """By time; events of one moment stay as they were written."""
    return sorted(events, key=lambda event: float(event["t_s"]))


class _Incarnations(dict[int, Line]):
    """Number -> a step's line with that incarnation alone, one object for all its steps."""

    def __missing__(self, number: int) -> Line:
        return self.setdefault(number, {"incarnation": number})


_INCARNATION = _Incarnations()
