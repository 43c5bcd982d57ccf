"""The subscribers of one replica's events."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftopt.events import Event, OnEvent
from ftopt.telemetry.jsonl import JsonLines


@dataclass(slots=True)
class CurrentStep:
    """The step that the loop is taking, for subscribers of ``stepped``."""

    loss: float = math.nan
    lr: float = 0.0
    local_step: int = 0


def step_log(lines: JsonLines, record: CurrentStep) -> OnEvent:
    """Writes a line for each inner step when it is done and before its outer step begins.

    A replica killed in an outer step has thus every executed step on record.
    """

    def on_event(event: Event) -> None:
        if event.event != "stepped":
            return
        assert event.inner_step is not None
        line = {"incarnation": event.incarnation, "local_step": record.local_step, "inner_step": event.inner_step}
        lines.write({**line, "loss": round(record.loss, 5), "lr": record.lr})

    return on_event
