"""The subscribers of one replica's events."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ftopt.events import Event, OnEvent
from ftopt.watch.jsonl import significant

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CurrentStep:
    """The step that the loop is taking, for subscribers of ``stepped``."""

    loss: float = math.nan
    lr: float = 0.0
    local_step: int = 0


OnStep = Callable[[dict[str, Any]], None]
"""Called with the line of an inner step."""


def step_log(record: CurrentStep, subscribers: Sequence[OnStep]) -> OnEvent:
    """Makes a line for each inner step after it is done and before its outer step begins, for each of ``subscribers``,
    to which others may be added.

    So a replica killed in an outer step has every executed step on record.
    """

    def on_event(event: Event) -> None:
        if event.event != "stepped":
            return
        assert event.inner_step is not None
        line: dict[str, Any] = {
            "incarnation": event.incarnation,
            "local_step": record.local_step,
            "inner_step": event.inner_step,
        }
        line |= {"loss": significant(record.loss), "lr": record.lr}
        line |= {what: count for what in ("tokens", "samples") if (count := event.data.get(what))}
        for subscriber in subscribers:
            subscriber(line)

    return on_event


class DroppedRounds:
    """Counts consecutive rounds in which this replica dropped its steps because they were not finite, while no replica
    had any that count. Any thread."""

    every_step = False

    def __init__(self) -> None:
        self._of_fragment: Counter[int | None] = Counter()

    @property
    def in_a_row(self) -> int:
        """Their number, for the fragment that has most."""
        return max(self._of_fragment.values(), default=0)

    def __call__(self, event: Event) -> None:
        if event.event == "discarded" and event.data["reason"] == "nonfinite":
            self._of_fragment[event.fragment] += 1
        elif event.event == "fetched" or (event.event == "prepare" and event.data["contributors"]):
            self._of_fragment = Counter()


class OwnEnd:
    """Warns that the job has reached the inner step at which this replica's own recipe ends, so that it trains nothing:
    else a forgotten override would look like a job that is done. Any thread.

    Args:
        inner_steps: the inner step at which it ends, ``train.inner_steps``.
        standby: it is a spare.
    """

    every_step = False

    def __init__(self, inner_steps: int, *, standby: bool) -> None:
        self._inner_steps, self._spare, self._standby = inner_steps, standby, standby
        self._beyond = set[int | None]()

    def __call__(self, event: Event) -> None:
        if event.event == "promoted":
            self._standby = False
        elif event.event == "fetched" and self._standby and not event.fragment:
            self._fetched(event)
        elif event.event == "started" and (event.inner_step or 0) >= self._inner_steps:
            _log.log(
                logging.ERROR if self._spare else logging.WARNING,
                "replica %s trains nothing: the job is at inner step %d, and ends at train.inner_steps=%d by this "
                "replica's recipe; if the job is to go on, start it with the same overrides as the other replicas; a "
                "new job has another name (--job)",
                event.replica,
                event.inner_step,
                self._inner_steps,
            )

    def _fetched(self, event: Event) -> None:
        """A job at its end may still make one version there; a job that makes another one goes on."""
        at, told = event.data["committed_step"], len(self._beyond) > 1
        if at < self._inner_steps or told:
            return
        self._beyond.add(event.version)
        if len(self._beyond) > 1:
            _log.warning(
                "replica %s stands by, and would train nothing: the job goes on at inner step %d, and ends at "
                "train.inner_steps=%d by this replica's recipe; start it again with the same overrides as the other "
                "replicas",
                event.replica,
                at,
                self._inner_steps,
            )
