"""One run, with what is known of it; `ftopt.watch.report.record` reads it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ftopt.common.plural import natural
from ftopt.watch.decisions import Incarnation
from ftopt.watch.jsonl import Line
from ftopt.watch.report.facts import Facts
from ftopt.watch.report.fold import Fold
from ftopt.watch.report.steps import Steps
from ftopt.watch.spread import Spread

_GOING_ON_S = 60.0
"""A run without a summary whose last line is younger than this is taken for one that is still going on."""


@dataclass
class Run:
    """One run, or what several machines have recorded of one.

    Args:
        name: its folder's name, with the job's where the folder has several.
        job: its name, as far as the folder tells; None: it does not.
        folders: where it was read from; several if they were merged.
        events: in the order of time; they are read from the folders each time.
        steps: replica -> its inner steps.
        facts: what a first reading of the events has found.
        summarized: there is a ``summary.json``: `ftopt run` has come to its end.
        recipe: the text of ``recipe.yaml``.
        about: when it began, versions; of ``about.json``.
        skipped: lines that could not be read.
        age_s: seconds since its last line was written.
        notes: what a reader must know of how it was read.
    """

    name: str
    job: str | None
    folders: list[Path]
    events: Iterable[Line]
    steps: dict[str, Steps]
    facts: Facts
    summarized: bool
    recipe: str | None
    about: dict[str, Any]
    skipped: int
    age_s: float
    notes: list[str] = field(default_factory=list)

    @cached_property
    def fold(self) -> Fold:
        """What a second reading of the events finds."""
        fold = Fold(self.facts, self.steps, self.replicas(), self.end_s, self.folders[0])
        for event in self.facts.lives.within(self.events):
            fold.add(event)
        fold.close()
        return fold

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of ``summary.json``; None for what ``unrecorded`` leaves unknown, as far as these have not told
        it either."""
        return self.fold.summary

    @property
    def unrecorded(self) -> list[str]:
        """The replicas whose inner steps are not, or not all, on record, although the coordinator names them."""
        return self.facts.unrecorded

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

    @cached_property
    def told(self) -> dict[Incarnation, Line]:
        """What incarnations without a record of their own have told the coordinator of their lives."""
        return self.facts.lives.told()

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
        return self.facts.decided

    @property
    def end_s(self) -> float:
        """When the last thing was recorded. Long after the job's end a replica may come, and be refused or given up."""
        last = max((steps.t_s[-1] for steps in self.steps.values() if steps), default=0.0)
        return max(last, self.facts.last_s)

    def replicas(self) -> list[str]:
        """All that ever were there, in the order of their names, numbers in them as numbers; one that was only refused
        was not."""
        return sorted(self.facts.replicas | set(self.steps), key=natural)

    def sent(self) -> dict[str, int]:
        """Replica -> bytes that its incarnations have sent in reductions, failed attempts included."""
        totals = {who: counts["sent"] for who, counts in self.told.items()} | self.fold.sent
        found: Counter[str] = Counter()
        for (replica, _), count in totals.items():
            found[replica] += count
        return {replica: found[replica] for replica in self.replicas() if replica in found}

    @property
    def lasting_waits(self) -> Spread:
        """How long outer steps have kept the incarnations that have not died."""
        found = Spread()
        for each in self.fold.waits.values():
            found.update(each.lasting)
        return found

    def waits_told(self) -> dict[str, float]:
        """Replica -> how long outer steps have kept its training thread in all, of those that have told only that."""
        found: dict[str, float] = defaultdict(float)
        for (replica, _), counts in self.told.items():
            found[replica] += counts["waited_s"]
        return {replica: found[replica] for replica in self.replicas() if replica in found}

    def named(self, *names: str) -> list[Line]:
        """Its events of these names, which are some of the rare ones that `Facts` holds."""
        return self.facts.named(*names)
