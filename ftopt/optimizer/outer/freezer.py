"""Snapshots that are taken while training goes on: parameters do not change between two inner steps.

A copy of the parameters, its norm, and the proposal are made on a thread of their own, behind the next forward and
backward pass; the training thread joins before anything changes the parameters. Whoever changes them behind ftopt's
back meanwhile loses nothing: a payload is computed from the copy, and what pending work is measured from is that same
copy, so a change is in this contribution or in the next.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from ftopt.streams import SideStream, reached

FreezeTask = Callable[[], Callable[[], None]]
"""What is done on the freezer's thread; returns what is left for the training thread."""


class Freezer:
    """A thread, made when it is first needed. Its methods are the training thread's.

    Attributes:
        under_way: what has not been joined.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._beside = SideStream()
        self.under_way: list[Future[Callable[[], None]]] = []

    def begin(self, device: torch.device, work: FreezeTask) -> None:
        """Does it behind the training thread; on a GPU on a stream of its own, after what has been queued so far."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ftopt-freezer")
        before = reached(device)

        def on_its_stream() -> Callable[[], None]:
            with self._beside.after(before, device):
                return work()

        self.under_way.append(self._thread.submit(on_its_stream))

    def join(self) -> None:
        """Waits for all of it, and does the rest."""
        while self.under_way:
            wait(self.under_way[:1])  # an interrupt leaves it under way
            self.under_way.pop(0).result()()
