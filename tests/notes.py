"""What a job's replicas and its coordinator have told, for jobs in one process."""

from __future__ import annotations

import threading
from collections import Counter

from ftopt.events import Event


class Notes:
    """All events; any thread may add one."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def of(self, name: str) -> list[Event]:
        with self._lock:
            return [event for event in self._events if event.event == name]

    def committed(self) -> Counter[int]:
        """Unit -> in how many contributions of commits it is."""
        ranges = [x for event in self.of("decide") for part in event.data.get("ranges", {}).values() for x in part]
        return Counter(unit for start, stop in ranges for unit in range(start, stop))
