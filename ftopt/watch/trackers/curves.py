"""The metrics of one replica, folded from its events; docs/watching.md explains them.

Points of the axis ``inner/step`` come every few inner steps, those of ``outer/version`` when a version is applied. If a
job has several fragments, the outer metrics of fragment ``n`` > 0 are called ``outer_n/...``: its versions are its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftopt.events import Event
from ftopt.watch.jsonl import record_of
from ftopt.watch.sentences import note_of

STEP = "inner/step"


ALERTS = {
    "damaged": "error",
    "diverged": "error",
    "discarded": "warn",
    "reset": "warn",
    "outlier": "warn",
    "checkpoint_failed": "warn",
    "replay_failed": "warn",
}
"""Events that a person should look at."""

_QUIET = ("mixed", "taken_over", "replaced")
"""Reasons to drop steps that are part of the method."""


@dataclass(frozen=True, slots=True)
class Point:
    """Values at one place of an axis."""

    axis: str
    at: int
    values: dict[str, Any]
    """Numbers; a loss may be a tensor on another device, which is not read yet."""


@dataclass(frozen=True, slots=True)
class Row:
    """A notable event. ``alert``: ``error`` or ``warn`` if a person should look at it, else ""."""

    inner_step: int
    incarnation: int
    event: str
    text: str
    alert: str = ""


@dataclass(slots=True)
class _Inner:
    """Sums since the last point."""

    since_s: float
    steps: int = 0
    losses: Any = 0.0
    told: int = 0
    tokens: int = 0
    samples: int = 0


@dataclass(slots=True)
class _Round:
    """What is known of a fragment's outer step under way. ``applied``: the next stall emits its point."""

    version: int = 0
    attempts: int = 0
    prepared: Mapping[str, Any] = field(default_factory=dict)
    values: dict[str, Any] | None = None
    applied: bool = False


class Curves:
    """Folds one replica's events into points and rows, a point every ``every`` inner steps. Not thread-safe."""

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.inner_step = 0
        self._every, self._clock = every, clock
        self._inner: _Inner | None = None
        self._rounds: dict[int, _Round] = {}
        self._stall_s = 0.0
        self._sums = {"steps_kept": 0, "steps_lost": 0, "joins": 0, "absences": 0}
        self._lr = math.nan

    def fold(self, event: Event) -> list[Point | Row]:
        """Takes up an event; returns what it adds, which is mostly nothing."""
        name = event.event
        if name == "inner":
            if self._inner is None:
                self._inner = _Inner(self._clock())
            return []
        if name == "stepped":
            return self._stepped(event)
        self.inner_step = max(self.inner_step, event.inner_step or 0)
        row = row_of(event)
        return [*self._taken(event), *([row] if row is not None else [])]

    def rest(self) -> list[Point | Row]:
        """The points that are left at the end."""
        return [*self._flush(), *self._inner_point()]

    def _stepped(self, event: Event) -> list[Point | Row]:
        self.inner_step, data, sums = event.inner_step or 0, event.data, self._inner
        if sums is None:
            sums = self._inner = _Inner(self._clock())
        sums.steps += 1
        sums.tokens += data.get("tokens", 0)
        sums.samples += data.get("samples", 0)
        self._lr = data.get("lr", math.nan)
        if (loss := data.get("loss")) is not None:
            sums.losses, sums.told = sums.losses + loss, sums.told + 1
        return self._inner_point() if sums.steps >= self._every else []

    def _inner_point(self) -> list[Point | Row]:
        sums, now = self._inner, self._clock()
        if sums is None or not sums.steps:
            return []
        self._inner = _Inner(now)
        values: dict[str, Any] = {"inner/lr": self._lr}
        if sums.told:
            values["inner/loss"] = sums.losses / sums.told
        if (seconds := now - sums.since_s) > 0:
            values["inner/steps_per_s"] = sums.steps / seconds
            values |= {"inner/tokens_per_s": sums.tokens / seconds} if sums.tokens else {}
            values |= {"inner/samples_per_s": sums.samples / seconds} if sums.samples else {}
        return [Point(STEP, self.inner_step, values)]

    def _taken(self, event: Event) -> list[Point | Row]:
        """The points that an event adds."""
        data, fragment = event.data, event.fragment or 0
        at = self._rounds.setdefault(fragment, _Round())
        match event.event:
            case "evaluate":
                scores = {name: data.get(name) for name in ("loss", "accuracy")} | data.get("metrics", {})
                values = {f"eval/{name}": value for name, value in scores.items() if isinstance(value, int | float)}
                return [Point(STEP, event.inner_step or 0, values)]
            case "reduce":
                if event.version != at.version:
                    at.version, at.attempts, at.prepared = event.version or 0, 0, {}
                at.attempts += 1
            case "prepare":
                at.prepared = data
            case "commit":
                return self._committed(event, at)
            case "fetched":
                found = self._flush(fragment)
                at.version, at.values = event.version or 0, {"fetched_bytes": data.get("bytes", 0)}
                return found
            case "apply" if at.values is not None and event.version == at.version:
                at.values["inner_step"], at.applied = event.inner_step, True
            case "stall":
                self._stall_s += data.get("stall_s", 0.0)
                return [point for number, x in list(self._rounds.items()) if x.applied for point in self._flush(number)]
            case "discarded" if not fragment:
                self._sums["steps_lost"] += data.get("steps", 0)
        return []

    def _committed(self, event: Event, at: _Round) -> list[Point | Row]:
        found, data, first = self._flush(event.fragment or 0), at.prepared, not event.fragment
        at.values = {_NAMES.get(name, name): value for name, value in data.items() if value is not None}
        at.values.pop("wire_bytes", None)
        at.values["aborts"] = max(0, at.attempts - 1)
        at.version, at.attempts, at.prepared = event.version or 0, 0, {}
        if first:
            self._sums["steps_kept"] += data.get("steps", 0)
            self._sums["joins"] += len(event.data.get("joined", ()))
            self._sums["absences"] += len(event.data.get("absent", ()))
        return found

    def _flush(self, index: int | None = None) -> list[Point | Row]:
        """The points of outer steps that are committed: of fragment ``index``; None: of all fragments."""
        found: list[Point | Row] = []
        for number in list(self._rounds) if index is None else [index]:
            at = self._rounds.get(number)
            if at is None or at.values is None:
                continue
            values, at.values, at.applied = at.values | {"stall_s": self._stall_s}, None, False
            self._stall_s = 0.0
            prefix = f"outer_{number}/" if number else "outer/"
            values |= {} if number else self._sums
            found.append(Point(f"{prefix}version", at.version, {prefix + name: v for name, v in values.items()}))
        return found


_NAMES = {"size": "members", "bytes": "sent_bytes", "received": "received_bytes", "seconds": "reduce_s"}
"""Data of the event ``prepare`` whose metrics have other names."""


def row_of(event: Event) -> Row | None:
    """A notable event as a row; None for other events."""
    name, data = event.event, event.data
    if name == "commit" and (data.get("joined") or data.get("absent")):
        who = [f"{', '.join(data[kind])} {kind}" for kind in ("joined", "absent") if data.get(kind)]
        text: str | None = f"version {event.version}: {'; '.join(who)}"
    elif name == "evaluate":
        text = None
    else:
        note = note_of(record_of(event))
        text = note.text if note is not None else None
    if text is None:
        return None
    alert = "" if name == "discarded" and data.get("reason") in _QUIET else ALERTS.get(name, "")
    return Row(event.inner_step or 0, event.incarnation, name, text, alert)
