"""The units of the sample ledger that a replica is granted, for its loader and its optimizer.

Between two threads: the loader and the training loop take and use units, the network thread brings new ones. In the
fault-free case nobody waits: a replica holds three rounds' worth after each commit, and asks in time.
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
"""Units beside three rounds' worth: what loaders prefetch."""
FIRST_WANTS = 8
"""Units of a round, before one was measured."""
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
        """Since when `take` has waited, by the monotonic clock; None: it does not."""
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
        """The next granted unit, in the order of the grants: for a sampler that prefetches.

        Blocks while there is none. None when the data has ended, or this replica has left; and when there is nothing
        more to grant for now while units that were taken wait for their inner step: take that step, and try again
        (`ended` tells one from the other).

        Raises:
            TimeoutError: none came within ``timeout_s``.
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
        """Whether there is nothing to take and nothing more is granted for now: the end of the data is near, or all
        that is left is with other replicas."""
        with self._changed.lock:
            return self._out_of_units and not self.queued

    def offer(self) -> Ranges:
        """Units of all steps that are not counted yet: they go with the contribution of fragment 0."""
        with self._changed.lock:
            ranges = super().offer()
            if self._round is None:
                self._measured = max(FIRST_WANTS, sum(stop - start for start, stop in ranges))
            return ranges

    def when_out_of_units(self, idle: Callable[[], None]) -> None:
        """While this thread waits in `take` for units that others hold, ``idle`` is called now and then.

        At the end of the data a replica waits for its peers: what it has left must be offered, or none could finish.
        """
        self._idle = (threading.current_thread(), idle)

    def while_waiting(self, look: Callable[[], None]) -> None:
        """While this thread waits in `take` for whatever reason, ``look`` is called now and then; what it raises ends
        the wait."""
        self._look = (threading.current_thread(), look)

    # ------------------------------------------------------------ the client

    @property
    def wants(self) -> int:
        """Units to hold after a commit: three rounds' worth, and what is prefetched, as far as may be asked for."""
        return min(3 * (self._round or self._measured) + SPARE, MAX_WANTS)

    def begin(
        self, ask: Callable[[], None], *, round_units: int | None, check: Callable[[], None] = lambda: None
    ) -> None:
        """The client starts. ``ask``: called on any thread when units run short. ``check``: raises when waiting is in
        vain.

        ``round_units``: units that a round takes: inner steps, times micro-batches a step. None: it is measured; the
        very first units are then granted as replicas ask, so that two runs are not bit-equal.
        """
        self._ask, self._round, self._check = ask, round_units, check

    def grant(self, ranges: Ranges, *, out_of_units: bool = False) -> None:
        """More units, or the answer that there are none."""
        with self._changed.lock:
            super().grant(ranges)
            self._out_of_units = out_of_units and not ranges
            self._changed.notify_all()

    def settle(self, done: Ranges, own: Ranges) -> Ranges:
        """These are in the committed state; see `UnitQueue.settle`."""
        with self._changed.lock:
            twice = super().settle(done, own)
            self.ended = self.samples.units is not None and done == ((0, self.samples.units),)
            self._changed.notify_all()
        return twice

    def reset(self) -> None:
        """This incarnation is gone, and what it held."""
        with self._changed.lock:
            super().reset()
            self._out_of_units = self.ended = False

    def close(self) -> None:
        """This replica has left: waiting ends."""
        with self._changed.lock:
            self._closed = True
            self._changed.notify_all()
