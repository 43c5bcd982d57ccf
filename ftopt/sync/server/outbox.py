"""Performs a job's effects, in order, once the journal has all earlier decisions (rule JOURNAL).

The machine goes on meanwhile: a disk that takes seconds for a write delays only its own job's decisions, not that job's
heartbeats nor other jobs' connections.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.server.journal import Journal

Act = Callable[[], None]


class Outbox:
    """One job's effects that wait for the disk. Loop thread only.

    Args:
        job: its name.
        failed: called with the reason when entries cannot be journalled and all waiting effects are dropped.
    """

    def __init__(self, job: str, journal: Journal, failed: Callable[[BaseException], None]) -> None:
        self._job, self._journal, self._failed = job, journal, failed
        self._waiting: deque[tuple[asyncio.Future[None] | None, Act]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, effects: e.Effects, act: Act) -> None:
        """Submits the entries in ``effects`` to the journal, and calls ``act`` when these and all before are on the
        disk. Calls it at once if nothing waits, and there are no entries or there is no file."""
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
        """Drops waiting effects, since the job has halted or is over."""
        self._waiting.clear()

    async def written(self) -> None:
        """Waits until all effects that wait now are done, or dropped."""
        last = self._waiting[-1] if self._waiting else None
        while last is not None and any(last is x for x in self._waiting):
            if pending := [x for x, _ in self._waiting if x is not None and not x.done()]:
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # their callbacks

    def _written(self, written: asyncio.Future[None]) -> None:
        written.exception()  # retrieves the exception, also of dropped effects
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
