"""Adds up what a replica's own events tell of its life, for its heartbeats: scripts write no record of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.limits import MAX_INT, MAX_REASONS, MAX_SECONDS, MAX_STEPS


class Tally:
    """Of one process. Events come on any thread; each kind of number changes on one."""

    def __init__(self) -> None:
        self._dropped: dict[str, int] = {}
        self._waited_s = 0.0
        self._sent = 0

    def hear(self, event: str, fragment: int | None, data: Mapping[str, Any]) -> None:
        """An event of this replica."""
        match event:
            case "discarded" if not fragment:
                known = {**self._dropped}  # the network thread may be reading
                known[data["reason"]] = known.get(data["reason"], 0) + int(data["steps"])
                self._dropped = dict([*known.items()][:MAX_REASONS])
            case "stall":
                self._waited_s = min(self._waited_s + float(data["stall_s"]), MAX_SECONDS)
            case "prepare":
                self._sent = min(int(data.get("wire_bytes", 0)), MAX_INT)

    def counts(self, steps: int, pending: int) -> m.Counts:
        """For a heartbeat."""
        steps = min(steps, MAX_STEPS)
        waited_s = round(self._waited_s, 3)
        return m.Counts(steps, max(0, min(pending, steps)), self._dropped, waited_s, self._sent)
