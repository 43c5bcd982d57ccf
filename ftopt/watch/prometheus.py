"""The answer to ``GET /metrics``: the coordinator's numbers in Prometheus' text exposition format 0.0.4.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/. Labels are bounded: jobs, fragments and replicas
by their limits, states by the names below, events by those of the machine. No label holds an incarnation, attempt or
version. Written by hand, since it is short, and a registry of counters would be a second source of truth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from resource import getpagesize
from typing import Any

from ftopt.events import Event
from ftopt.watch.sentences import is_death
from ftopt.watch.status import state_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = frozenset(
    {"starting", "training", "waiting", "fetching", "evaluating", "checkpointing", "compiling", "busy", "leaving",
     "out_of_units", "standby", "done", "stalled", "slow", "away"}
)  # fmt: skip
"""States of replicas that are shown by name. Any other (``optimizer.busy("...")`` takes any text) is ``other``."""
FROM_ZERO = ("join", "return", "lost", "gone", "leave", "quorum", "abort", "decide", "stalled", "slow", "mismatch",
             "rollback", "halt")  # fmt: skip
"""Events that are counted from 0, so that the first one is a rise, too."""
FAMILIES = {
    "ftopt_uptime_seconds": ("gauge", "Seconds since the coordinator has listened."),
    "ftopt_resident_memory_bytes": ("gauge", "Resident memory of the coordinator's process."),
    "ftopt_journal_bytes": ("gauge", "Size of the journal's files, 0 without one."),
    "ftopt_connections": ("gauge", "Connections of replicas, over all jobs."),
    "ftopt_waiting_connections": ("gauge", "Connections that have not shown the token yet."),
    "ftopt_refused_connections_total": (
        "counter",
        "Connections refused: token (none, or a wrong one), accept_queue (no token in time, or too many waiting), "
        "connections (too many replicas), message (none of the protocol's), limit (too much on a connection).",
    ),
    "ftopt_job_up": ("gauge", "1 while the job runs; 0 while it starts up, or has halted."),
    "ftopt_job_halted": ("gauge", "1 while the job has halted: its journal cannot be written, or another epoch."),
    "ftopt_job_epoch": ("gauge", "Epoch of the job's machine."),
    "ftopt_job_connections": ("gauge", "Connections of the job."),
    "ftopt_job_inner_step": ("gauge", "Committed inner step."),
    "ftopt_fragment_version": ("gauge", "Outer steps committed."),
    "ftopt_fragment_proposals": ("gauge", "Replicas whose contribution waits for the next outer step."),
    "ftopt_fragment_round_age_seconds": (
        "gauge",
        "Seconds since the last outer step, or since this process has run the job.",
    ),
    "ftopt_replicas": ("gauge", "Known replicas by state."),
    "ftopt_replica_connected": ("gauge", "1 while the replica is connected."),
    "ftopt_replica_inner_step": ("gauge", "Inner step, as last reported by the replica."),
    "ftopt_replica_step_seconds": ("gauge", "Usual seconds of an inner step, as last reported by the replica."),
    "ftopt_replica_loss": ("gauge", "Mean loss of the replica's last inner steps, where it tells one; NaN included."),
    "ftopt_replica_relative_speed": (
        "gauge",
        "Usual seconds of an inner step in the job, divided by the replica's own: 0.2 is five times slower; "
        "1 while it is not known.",
    ),
    "ftopt_events_total": ("counter", "Events of the job, by name (docs/watching.md)."),
    "ftopt_deaths_total": ("counter", "Incarnations removed: superseded, away for too long, or on another branch."),
    "ftopt_messages_total": ("counter", "Messages of the job's connections, by direction: received, sent."),
    "ftopt_message_bytes_total": ("counter", "Bytes of these messages."),
}
"""Name -> kind and help."""


class Exposition:
    """Samples of `FAMILIES`, and their text."""

    def __init__(self) -> None:
        self._samples: dict[str, list[str]] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Adds one sample. ``value``: any number, finite or not."""
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        braced = f"{{{shown}}}" if shown else ""
        self._samples.setdefault(name, []).append(f"{name}{braced} {_number(value)}")

    def text(self) -> str:
        """The text; a family's samples follow its head, as the format requires."""
        lines = []
        for name, (kind, help_) in FAMILIES.items():
            if samples := self._samples.get(name):
                lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}", *samples]
        return "\n".join(lines) + "\n"


class JobMetrics:
    """What is counted for a job in addition to its machine's own numbers, since this process runs it."""

    def __init__(self) -> None:
        self._events = Counter(dict.fromkeys(FROM_ZERO, 0))
        self._deaths = 0
        self._messages = {"received": 0, "sent": 0}
        self._bytes = {"received": 0, "sent": 0}
        self._began_s = 0.0
        self._decided_s: dict[int, float] = {}

    def count(self, event: Event, now: float) -> None:
        """Counts an event that the coordinator emitted."""
        self._events[event.event] += 1
        match event.event:
            case "start" | "recover":
                self._began_s = now
                self._decided_s.clear()
            case "decide" if event.fragment is not None:
                self._decided_s[event.fragment] = now
            case "gone":
                self._deaths += is_death(event)

    def message(self, direction: str, size: int) -> None:
        """Counts a message of ``size`` bytes that was ``received`` or ``sent``."""
        self._messages[direction] += 1
        self._bytes[direction] += size

    def age_s(self, fragment: int, now: float) -> float:
        """Seconds since the last outer step of ``fragment``, or since this process began to run the job."""
        return now - self._decided_s.get(fragment, self._began_s)

    def show(self, to: Exposition, status: Mapping[str, Any], now: float) -> None:
        """Adds one job's samples. ``status``: as ``/status`` shows it. ``now``: the clock of `count`, in seconds."""
        job = status["job"]
        up = status["phase"] == "running"
        to.add("ftopt_job_up", up, job=job)
        if status["epoch"] is not None:
            to.add("ftopt_job_epoch", status["epoch"], job=job)
        if up:
            to.add("ftopt_job_inner_step", status["fragments"][0]["inner_step"], job=job)
            for number, fragment in enumerate(status["fragments"]):
                labels = {"job": job, "fragment": str(number)}
                to.add("ftopt_fragment_version", fragment["version"], **labels)
                to.add("ftopt_fragment_proposals", len(fragment["proposed"]), **labels)
                to.add("ftopt_fragment_round_age_seconds", self.age_s(number, now), **labels)
        states = Counter(state if (state := state_of(x)) in STATES else "other" for x in status["replicas"])
        for state in sorted({"training", "waiting", "away", *states}):
            to.add("ftopt_replicas", states[state], job=job, state=state)
        for replica in status["replicas"]:
            labels = {"job": job, "replica": replica["replica"]}
            to.add("ftopt_replica_connected", replica["state"] != "away", **labels)
            to.add("ftopt_replica_inner_step", replica["inner_step"], **labels)
            to.add("ftopt_replica_step_seconds", replica["step_s"], **labels)
            if (loss := replica["loss"]) is not None:
                to.add("ftopt_replica_loss", float(loss), **labels)
            to.add("ftopt_replica_relative_speed", 1 / (replica.get("factor") or 1.0), **labels)
        for event, count in sorted(self._events.items()):
            to.add("ftopt_events_total", count, job=job, event=event)
        to.add("ftopt_deaths_total", self._deaths, job=job)
        for direction, count in self._messages.items():
            to.add("ftopt_messages_total", count, job=job, direction=direction)
            to.add("ftopt_message_bytes_total", self._bytes[direction], job=job, direction=direction)


def resident_bytes() -> int | None:
    """Resident memory of this process; None where the system does not report it like this (outside of Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * getpagesize()
    except OSError:
        return None


def _number(value: float) -> str:
    """A number as the format has it; Python writes ``nan`` and ``inf``."""
    if math.isfinite(value):
        return str(value + 0)  # a bool is a number
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
