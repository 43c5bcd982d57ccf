"""One run and its data; `ftopt.watch.report.record` reads it."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ftopt.common.plural import natural
from ftopt.common.spread import Spread
from ftopt.watch.decisions import Incarnation
from ftopt.watch.folder import since_1970_s
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.report.facts import COORDINATOR, Facts
from ftopt.watch.report.fold import Fold
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.stream import of_a_run

N = TypeVar("N", int, float)
_GOING_ON_S = 60.0
"""A run without a summary whose last line is younger than this counts as still going on."""


@dataclass
class Run:
    """One run, or the merged records of one run from several machines. ``job``: None where the folder does not say.
    ``events``: each iteration reads them from the folders, in the order of time. ``summarized``: there is a
    ``summary.json``. ``recipe``, ``about``: from the files of these names. ``skipped``: lines that could not be read.
    ``age_s``: seconds since its last line. ``notes``: what a reader must know about how it was read."""

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
        fold = Fold(self.facts, self.steps, self.replicas(), self.end_s)
        with of_a_run(self.folders[0]):
            for event in self.facts.lives.within(self.events):
                fold.add(event)
            fold.close()
        return fold

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of ``summary.json``; None for those that remain unknown because ``unrecorded`` replicas have not
        reported them either."""
        return self.fold.summary

    @property
    def ended(self) -> bool:
        """Whether nothing more comes: it was summarized, or each replica has reported its end."""
        return (
            self.summarized
            or self.interruption is not None
            or bool((self.steps or self.facts.named("leave")) and not self.without_end())
        )

    @cached_property
    def interruption(self) -> Line | None:
        """The event that a signal has ended the run; None: it has not, or the coordinator has come back."""
        for event in reversed(self.facts.named("interrupted", "spawn", "start", "recover")):
            if event["event"] == "interrupted":
                return event
            if event["event"] != "spawn" or event["replica"] == COORDINATOR:
                return None
        return None

    def without_end(self) -> list[str]:
        """The replicas whose record does not reach their end."""
        told: set[str] = set()
        for event in self.facts.named("end", "spawn"):  # a restarted replica goes on in its folder
            (told.add if event["event"] == "end" else told.discard)(event["replica"])
        there: set[str] = set()  # according to the coordinator
        for event in self.facts.named("join", "return", "leave", "gone", "death"):
            (there.add if event["event"] in ("join", "return") else there.discard)(event["replica"])
        silent = set(self.facts.unrecorded) - there  # has left, or died
        return [replica for replica in self.replicas() if replica not in told | silent]

    @cached_property
    def told(self) -> dict[Incarnation, Line]:
        """The reports to the coordinator by incarnations without a record of their own."""
        return self.facts.lives.told()

    @property
    def partly(self) -> bool:
        """Whether the number of inner steps taken is unknown: a replica has neither recorded nor reported it."""
        return self.summary["inner_steps_executed"] is None

    @property
    def going_on(self) -> bool:
        return not self.ended and self.age_s < _GOING_ON_S

    @property
    def loss_unit(self) -> str:
        """`` nats`` for the built-in cross-entropy; "" for a loss of the user's own, whose unit is unknown."""
        own = self.recipe is None or re.search(r"^task:\n +name: (?!cross_entropy)", self.recipe, re.MULTILINE)
        return "" if own else " nats"

    @property
    def end_s(self) -> float:
        """Time of the last record. (Long after the job's end a replica may come, and be refused or evicted.)"""
        last = max((steps.t_s[-1] for steps in self.steps.values() if steps), default=0.0)
        return max(last, self.facts.last_s)

    @property
    def ran_s(self) -> float:
        """When the job ended: when a signal has ended the run and no replica of others trains on, this is when the last
        one had left; the rest of the record is the wait for their processes."""
        if (last := self.interruption) is None or data_of(last).get("others") or self.without_end():
            return self.end_s
        ends = [event["t_s"] for event in self.facts.named("join", "return", "leave", "death", "end")]
        return max(ends, default=self.end_s)

    def utc(self, t_s: float, form: str = "%H:%M:%S") -> str:
        """The time of day, in UTC, at a second of the run; "" where no folder says when it began."""
        began_s = since_1970_s(self.about.get("began"))
        return "" if began_s is None else time.strftime(form, time.gmtime(began_s + t_s))

    def replicas(self) -> list[str]:
        """All replicas that were ever there, sorted by name with numbers as numbers; a replica that was only refused
        was not."""
        return sorted(self.facts.replicas | set(self.steps), key=natural)

    def members(self) -> list[str]:
        """Those of `replicas` that have joined, or have inner steps on record."""
        there = {event["replica"] for event in self.facts.named("join", "return", "started")}
        there |= {*self.facts.unrecorded, *(replica for replica, own in self.steps.items() if own)}
        return [replica for replica in self.replicas() if replica in there]

    @property
    def lost(self) -> bool:
        """Whether the run has ended with no replica that came to its end, so that none has handed over the model."""
        there: set[str] = set()
        for event in self.facts.named("end", "leave", "death"):
            reason = data_of(event).get("reason")
            good = event["event"] != "death" and reason in (("done", "left") if event["event"] == "end" else (None, ""))
            (there.add if good else there.discard)(event["replica"])
        return self.ended and not there

    def sent(self) -> dict[str, int]:
        """Replica -> bytes that its incarnations have sent in reductions, including failed attempts."""
        return self._of_each({who: counts["sent"] for who, counts in self.told.items()} | self.fold.sent)

    @property
    def lasting_waits(self) -> Spread:
        """How long outer steps have kept the incarnations waiting that have not died."""
        found = Spread()
        for each in self.fold.waits.values():
            found.update(each.lasting)
        return found

    def waits_told(self) -> dict[str, float]:
        """Replica -> total time that outer steps have kept its training thread, for those that have reported only
        that."""
        return self._of_each({who: counts["waited_s"] for who, counts in self.told.items()})

    def _of_each(self, values: Mapping[Incarnation, N]) -> dict[str, N]:
        """The sums over each replica's incarnations."""
        found: dict[str, N] = {}
        for (replica, _), value in values.items():
            found[replica] = found.get(replica, 0) + value
        return {replica: found[replica] for replica in self.replicas() if replica in found}

    def told_contributions(self) -> tuple[int, int]:
        """How many contributions those have made that `waits_told` knows, and how many of these are undone."""
        decisions = self.fold.figures.decisions
        undone = sum(decisions.undone_contributions[who] for who in self.told)
        stand = sum(each.contributions[who] for each in decisions.result().values() for who in self.told)
        return stand + undone, undone

    def waited_for(self) -> dict[str, Counter[str]]:
        """Replica -> replica that it has waited for -> seconds; of those whose training waits for outer steps."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for who in self.fold.awaited.of:
            if self.facts.lives.waits(who):
                found[who[0]].update(self.fold.awaited.within(who, *self.facts.lives.waited(who)))
        return found
