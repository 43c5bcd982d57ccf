"""The units of the sample ledger that a replica is granted, for its loader and its optimizer.

Used by two threads: the loader and the training loop take and use units, the network thread brings new ones. Without
faults nobody waits: a replica holds three rounds' worth after each commit, and asks in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from ftopt.errors import UserError
from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.ledger.unit_queue import UnitQueue
from ftopt.sync.protocol.limits import MAX_WANTS
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.replica.changed import Changed

P = ParamSpec("P")
R = TypeVar("R")

SPARE = 16
"""Units in addition to three rounds' worth, for loaders that prefetch."""
FIRST_WANTS = 8
"""Assumed units of a round, before one was measured."""
_IDLE_S = 0.05


def _locked(method: Callable[Concatenate[UnitQueue, P], R]) -> Callable[Concatenate[Units, P], R]:
    @wraps(method)
    def call(self: Units, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._changed.lock:
            return method(self, *args, **kwargs)

    return call


class Units(UnitQueue):
    """One replica's units of ``samples``: its `UnitQueue`, for any thread; `take` blocks."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self.samples = samples
        self._round: int | None = None
        self._measured = FIRST_WANTS
        self._changed = Changed()
        self._out_of_units = False
        self.ended = False
        """Whether every unit of the job is in the committed state that this replica holds (``epochs`` reached)."""
        self.waits_since_s: float | None = None
        """Since when `take` has waited, by the monotonic clock; None: it does not wait."""
        self._closed = False
        self._ask: Callable[[], None] | None = None
        self._check: Callable[[], None] = lambda: None
        self._idle: tuple[threading.Thread, Callable[[], None]] | None = None
        self._look: tuple[threading.Thread, Callable[[], None]] | None = None

    draw = _locked(UnitQueue.draw)
    use = _locked(UnitQueue.use)
    unuse = _locked(UnitQueue.unuse)
    redo = _locked(UnitQueue.redo)
    spend = _locked(UnitQueue.spend)
    kept = _locked(UnitQueue.kept)
    put_back = _locked(UnitQueue.put_back)
    grant_first = _locked(UnitQueue.grant_first)

    # ------------------------------------------------------------ the loader and the training loop

    def take(self, timeout_s: float | None = None) -> int | None:
        """The next granted unit, in the order of the grants, for a sampler that prefetches.

        Blocks while there is none. Returns None when the data has ended, or this replica has left. Also returns None
        when nothing more can be granted for now, but taken units wait for their inner step: take that step, and try
        again (`ended` distinguishes the cases).

        Raises:
            TimeoutError: no unit came within ``timeout_s``.
            ftopt.errors.UserError: this replica has not joined its job.
            ftopt.errors.FtoptError: its membership has ended; see `ReplicaGroup.check`.
        """
        ask = self._ask
        if ask is None:
            raise UserError(
                "a unit was asked for before this replica has joined its job, which hands the units out; put the "
                "training loop inside `with optimizer:`"
            )
        began_s = time.monotonic()
        deadline_s = None if timeout_s is None else began_s + timeout_s
        while True:
            self._check()
            with self._changed.lock:
                unit = super().take()
                if unit is not None:
                    low = self.queued <= self.wants // 6
                    break
                if self.ended or self._closed or (self._out_of_units and self.unused):
                    return None
                if not self._out_of_units:
                    ask()
                left_s = _IDLE_S if deadline_s is None else min(_IDLE_S, deadline_s - time.monotonic())
                if left_s <= 0:
                    raise TimeoutError(f"no unit was granted within {timeout_s:g} s")
            self.waits_since_s = began_s
            self._changed.wait_for(lambda: bool(self.queued) or self.ended or self._closed, left_s)
            out_of_units = self.out_of_units
            if out_of_units and self._idle is not None and self._idle[0] is threading.current_thread():
                self._idle[1]()
            if self._look is not None and self._look[0] is threading.current_thread():
                self._look[1]()
        self.waits_since_s = None
        if low:
            ask()
        return unit

    # ------------------------------------------------------------ the optimizer

    @property
    def out_of_units(self) -> bool:
        """Whether there is nothing to take, and nothing more to grant for now: the data are near their end, or other
        replicas hold the rest."""
        with self._changed.lock:
            return self._out_of_units and not self.queued

    def offer(self) -> Ranges:
        """The units of all steps not counted yet, for the contribution of fragment 0."""
        with self._changed.lock:
            ranges = super().offer()
            if self._round is None:
                self._measured = max(FIRST_WANTS, sum(stop - start for start, stop in ranges))
            return ranges

    def when_out_of_units(self, idle: Callable[[], None]) -> None:
        """Sets ``idle``, which is called now and then while this thread waits in `take` for units that others hold.

        At the end of the data a replica waits for its peers; it must offer its remaining steps, or none could finish.
        """
        self._idle = (threading.current_thread(), idle)

    def while_waiting(self, look: Callable[[], None]) -> None:
        """Sets ``look``, which is called now and then while this thread waits in `take` for any reason; its exception
        ends the wait."""
        self._look = (threading.current_thread(), look)

    # ------------------------------------------------------------ the client

    @property
    def wants(self) -> int:
        """Units to hold after a commit: three rounds' worth plus the prefetched ones, up to the protocol's limit."""
        return min(3 * (self._round or self._measured) + SPARE, MAX_WANTS)

    def begin(
        self, ask: Callable[[], None], *, round_units: int | None, check: Callable[[], None] = lambda: None
    ) -> None:
        """Called when the client starts. ``ask``: called on any thread when units run short. ``check``: raises when
        waiting is futile.

        ``round_units``: units per round: inner steps times micro-batches per step. None: it is measured; the first
        units are then granted in the order in which replicas ask, so that two runs are not bit-equal.
        """
        self._ask, self._round, self._check = ask, round_units, check

    def grant(self, ranges: Ranges, *, out_of_units: bool = False) -> None:
        """Adds units, or takes the answer that there are none."""
        with self._changed.lock:
            super().grant(ranges)
            self._out_of_units = out_of_units and not ranges
            self._changed.notify_all()

    def settle(self, done: Ranges, own: Ranges) -> Ranges:
        """Settles units that are in the committed state; see `UnitQueue.settle`."""
        with self._changed.lock:
            twice = super().settle(done, own)
            self.ended = self.samples.units is not None and done == ((0, self.samples.units),)
            self._changed.notify_all()
        return twice

    def reset(self) -> None:
        """Forgets all units, since this incarnation is gone."""
        with self._changed.lock:
            super().reset()
            self._out_of_units = self.ended = False

    def close(self) -> None:
        """Ends waiting, since this replica has left."""
        with self._changed.lock:
            self._closed = True
            self._changed.notify_all()
