"""The subscribers of one replica's events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ftopt.events import Event, OnEvent
from ftopt.telemetry.jsonl import JsonLines


@dataclass(slots=True)
class CurrentStep:
    """The step that the loop is taking, for subscribers of ``stepped``."""

    loss: float = math.nan
    lr: float = 0.0
    local_step: int = 0


class StepLog:
    """Writes a line for each inner step when it is done and before its outer step begins.

    A replica killed in an outer step has thus every executed step on record.

    Args:
        lines: the replica's file.
        record: is read at each step.
        also: called with each step, too (tracking).
    """

    def __init__(
        self, lines: JsonLines, record: CurrentStep, also: Callable[[CurrentStep, int], None] | None = None
    ) -> None:
        self._lines = lines
        self._record = record
        self._also = also

    def __call__(self, event: Event) -> None:
        if event.event != "stepped":
            return
        record = self._record
        assert event.inner_step is not None
        self._lines.write(
            {
                "incarnation": event.incarnation,
                "local_step": record.local_step,
                "inner_step": event.inner_step,
                "loss": round(record.loss, 5),
                "lr": record.lr,
            }
        )
        if self._also is not None:
            self._also(record, event.inner_step)


def fan_out(*subscribers: OnEvent) -> OnEvent:
    """One ``on_event`` that calls each of ``subscribers``, in this order."""

    def on_event(event: Event) -> None:
        for subscriber in subscribers:
            subscriber(event)

    return on_event
