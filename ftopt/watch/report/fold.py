"""The second reading of a run's events: figures and pictures, in memory that does not grow with the outer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ftopt.watch.decisions import Incarnation
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.lanes import Awaited, Lane
from ftopt.watch.report.facts import Facts
from ftopt.watch.report.rounds import Heard, Rounds, Staleness, Waits, moments
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.stream import WRONG
from ftopt.watch.report.text import cut
from ftopt.watch.report.timeline import Timeline
from ftopt.watch.story import Story
from ftopt.watch.summary import Figures
from ftopt.watch.thin import Ends

_REASONS = 10_000
_BY_REPLICAS = ("inner_steps_executed", "inner_steps_pending", "dead_inner_steps_lost", "survivor_inner_steps_lost")
"""Figures that are unknown unless every replica's own record is there."""
_FAILED = 2
_MEMORABLE = {"promoted": 0, "start": 1, "recover": 1, "job_failed": _FAILED, "slow": 3, "up_to_speed": 3}
"""Event -> its place in the story; each life of the coordinator repeats why the job has failed."""


class Fold:
    """Takes up the events in order. ``sent``: the bytes in reductions, failed
    attempts included. ``aborted``, ``reasons``: when attempts have failed, and why how often. ``log``: time and
    sentence of each notable event. ``awaited``: whom replicas have waited for. ``states``: replica -> its states over
    time."""

    def __init__(self, facts: Facts, steps: Mapping[str, Steps], replicas: Sequence[str], end_s: float) -> None:
        self._facts, self._steps = facts, steps
        self.figures, self._story = Figures(), Story(0, slow_s=0.0)
        self.rounds, self.staleness = Rounds(decided=facts.decided), Staleness(steps)
        self.sent: dict[Incarnation, int] = {}
        mortal = {replica for replica, _ in facts.dead}
        self.waits = {name: Waits(len(facts.waiting), dies=name in mortal) for name in sorted(facts.waiting)}
        self.heard = Heard(steps)
        self.aborted, self.reasons, self.log = moments(), Counter[str](), Ends[tuple[float, str]]()
        self._kept: dict[int, list[tuple[float, str]]] = {}
        silent = set(facts.unrecorded) - {event["replica"] for event in facts.named("end")}
        waits = {who: facts.lives.waits(who) for who in facts.lives.of.keys() - facts.lives.recorded}
        self._timeline = Timeline(steps, replicas, silent, waits, end_s)
        self.awaited = Awaited()
        self.summary: dict[str, Any] = {}
        self.states: dict[str, Lane] = {}

    def add(self, event: Line) -> None:
        name, data, who = event["event"], data_of(event), (event["replica"], event["incarnation"])
        self.figures.add(event)
        self._timeline.add(event)
        with suppress(*WRONG):
            if (note := self._story.take(event)) is not None:
                line = float(event["t_s"]), cut(note.text, 240)
                self.log.add(line)
                if name in _MEMORABLE and (name not in ("start", "recover") or data.get("undone")):
                    self._kept.setdefault(_MEMORABLE[name], []).append(line)
        if name in ("prepare", "decide", "abort", "commit"):
            self.rounds.add(event)
        if name in ("propose", "apply", "decide"):
            self.staleness.add(event)
        elif name == "prepare":
            self.sent[who] = max(self.sent.get(who, 0), int(data["wire_bytes"]))
        elif name == "stall":
            lasts = who not in self._facts.dead
            self.waits[event["replica"]].add(event["t_s"], float(data["stall_s"]), lasts=lasts)
        elif name == "quorum":
            self.awaited.add(event["t_s"], event.get("fragment", 0), data)
        elif name == "losses":
            self.heard.add(event)
        elif name == "abort":
            self.aborted.add(event["t_s"])
            reason = cut(str(data.get("reason", "no reason given")), 160)
            if reason in self.reasons or len(self.reasons) < _REASONS:
                self.reasons[reason] += 1

    def memorable(self) -> list[list[tuple[float, str]]]:
        """Lines of `log` that no reader should miss, grouped by topic."""
        return [lines[:1] if kind == _FAILED else lines for kind, lines in sorted(self._kept.items())]

    def close(self) -> None:
        self.states = self._timeline.close()
        self.rounds.close()
        more, told = self._facts.lives.as_recorded()
        taken = Counter((replica, i) for replica, own in self._steps.items() for i in own.incarnation)
        taken.update(told)
        for event in more:
            self.figures.add(event)
        self.summary = self.figures.summary(taken, first_alone=bool(told))
        self.summary["dead_inner_steps_unreported"] = self._facts.lives.unreported(self._facts.dead)
        if not self._facts.lives.is_complete(self._facts.unrecorded, self._facts.dead):
            self.summary |= dict.fromkeys(_BY_REPLICAS)
