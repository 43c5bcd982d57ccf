"""The subscribers of one replica's events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftopt.events import Event, OnEvent
from ftopt.telemetry.wandb import WandbMirror


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
        line |= {"loss": round(record.loss, 5), "lr": record.lr}
        if tokens := event.data.get("tokens"):
            line["tokens"] = tokens
        for subscriber in subscribers:
            subscriber(line)

    return on_event


def to_mirror(mirror: WandbMirror) -> OnStep:
    """Gives each step to wandb."""

    def on_step(line: dict[str, Any]) -> None:
        mirror.step(line["inner_step"], loss=line["loss"], lr=line["lr"])

    return on_step


def fan_out(*subscribers: OnEvent) -> OnEvent:
    """One ``on_event`` that calls each of ``subscribers``, in this order."""

    def on_event(event: Event) -> None:
        for subscriber in subscribers:
            subscriber(event)

    return on_event
