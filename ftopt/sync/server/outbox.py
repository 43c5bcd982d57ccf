"""What a job does once the journal has what was decided before (rule JOURNAL): its effects, in their order.

The machine goes on meanwhile: a disk that takes seconds for a write holds up the decisions of its own job, and neither
the heartbeats of that job nor the connections of other ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.server.journal import Journal

Act = Callable[[], None]


class Outbox:
    """What one job has yet to do, since the disk is slow. Loop thread only.

    Args:
        job: its name.
        failed: called with why something cannot be journalled, when all that waited is dropped.
    """

    def __init__(self, job: str, journal: Journal, failed: Callable[[BaseException], None]) -> None:
        self._job, self._journal, self._failed = job, journal, failed
        self._waiting: deque[tuple[asyncio.Future[None] | None, Act]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, effects: e.Effects, act: Act) -> None:
        """Journals what is to be journalled of ``effects``, and does ``act`` when that, and all before it, is on the
        disk: at once where nothing of it is to be journalled, or there is no file, and nothing waits."""
        future = None
        if entries := [x for x in effects if isinstance(x, e.Journalled)]:
            future = self._journal.submit(self._job, entries)
        if future is None and not self._waiting:
            act()
            return
        self._waiting.append((future, act))
        if future is not None:
            future.add_done_callback(self._written)

    def clear(self) -> None:
        """What waits is not done: the job has halted, or is over."""
        self._waiting.clear()

    async def written(self) -> None:
        """Waits until all that waits now has been done, or dropped."""
        last = self._waiting[-1] if self._waiting else None
        while last is not None and any(last is x for x in self._waiting):
            if pending := [x for x, _ in self._waiting if x is not None and not x.done()]:
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # their callbacks

    def _written(self, written: asyncio.Future[None]) -> None:
        written.exception()  # it is looked at, also where it was dropped
        while self._waiting:
            future, act = self._waiting[0]
            if future is not None and not future.done():
                return
            self._waiting.popleft()
            if future is not None and (error := future.exception()) is not None:
                self._waiting.clear()
                self._failed(error)
                return
            try:
                act()
            except BaseException:
                self._waiting.clear()  # the job has halted, or the process ends
                raise
