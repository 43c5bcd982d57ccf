"""What a job does once the journal has what was decided before (rule JOURNAL): its effects, in their order.

The machine goes on meanwhile: a disk that takes seconds for a write holds up the decisions of its own job, and neither
the heartbeats of that job nor the connections of other ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ftopt.sync.protocol.coordinator import effects as e
from ftopt.sync.server.journal import Journal


class Outbox:
    """The effects of one job that wait for the disk. Loop thread only.

    Args:
        job: its name.
        perform: does some of them.
        failed: called with why they cannot be journalled, when all that waited is dropped.
    """

    def __init__(
        self,
        job: str,
        journal: Journal,
        perform: Callable[[e.Effects], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._job, self._journal, self._perform, self._failed = job, journal, perform, failed
        self._waiting: deque[tuple[asyncio.Future[None] | None, e.Effects]] = deque()

    def add(self, effects: e.Effects) -> None:
        """Journals what is to be journalled of them, and does them when that is on the disk; at once, where there is no
        file and nothing waits."""
        future = None
        if entries := [x for x in effects if isinstance(x, e.Journalled)]:
            future = self._journal.submit(self._job, entries)
        if future is None and not self._waiting:
            self._perform(effects)
            return
        self._waiting.append((future, effects))
        if future is not None:
            future.add_done_callback(self._written)

    def clear(self) -> None:
        """What waits is not done: the job has halted."""
        self._waiting.clear()

    async def written(self) -> bool:
        """Waits until nothing waits; whether anything did."""
        waited = bool(self._waiting)
        while self._waiting:
            await asyncio.wait([x for x, _ in self._waiting if x is not None])
            await asyncio.sleep(0)  # their callbacks
        return waited

    def _written(self, written: asyncio.Future[None]) -> None:
        written.exception()  # it is looked at, also where it was dropped
        while self._waiting:
            future, effects = self._waiting[0]
            if future is not None and not future.done():
                return
            self._waiting.popleft()
            if future is not None and (error := future.exception()) is not None:
                self._waiting.clear()
                self._failed(error)
            else:
                self._perform(effects)
