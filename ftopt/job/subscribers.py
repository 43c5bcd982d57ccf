"""The subscribers of one replica's events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftopt.events import Event, OnEvent
from ftopt.telemetry.jsonl import significant


@dataclass(slots=True)
class CurrentStep:
    """The step that the loop is taking, for subscribers of ``stepped``."""

    loss: float = math.nan
    lr: float = 0.0
    local_step: int = 0


OnStep = Callable[[dict[str, Any]], None]
"""Called with the line of an inner step."""


def step_log(record: CurrentStep, *subscribers: OnStep) -> OnEvent:
    """Makes a line for each inner step when it is done and before its outer step begins, for each of ``subscribers``.

    A replica killed in an outer step has thus every executed step on record.
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
    """Counts the rounds in a row whose steps this replica has dropped because they were not finite, while no replica
    had any that count. Any thread."""

    every_step = False

    def __init__(self) -> None:
        self._of_fragment: Counter[int | None] = Counter()

    @property
    def in_a_row(self) -> int:
        """How many, of the fragment that has most."""
        return max(self._of_fragment.values(), default=0)

    def __call__(self, event: Event) -> None:
        if event.event == "discarded" and event.data["reason"] == "nonfinite":
            self._of_fragment[event.fragment] += 1
        elif event.event == "fetched" or (event.event == "prepare" and event.data["contributors"]):
            self._of_fragment = Counter()
