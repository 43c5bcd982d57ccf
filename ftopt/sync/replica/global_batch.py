"""A replica's share of the global batch under way, for its loader and its optimizer.

Used by two threads: the training thread computes unit after unit and offers the sum; the network thread brings plans.
When a replica fails, a newer plan adds units to the offered share: `GlobalBatch.next` goes on with them, and ends when
the batch is committed.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from ftopt.errors import UserError
from ftopt.sync.protocol.intervals import Ranges, intersect, size, subtract, union
from ftopt.sync.protocol.ledger.plans import Portion
from ftopt.sync.protocol.messages import Plan
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.replica.changed import Changed

_AGAIN_S = 0.05
_LOOK_S = 1.0
_MEASURED = 9
_ENOUGH = 3


class Computes(Protocol):
    """What a `GlobalBatch` needs of the optimizer. Training thread."""

    @property
    def version(self) -> int:
        """The version that the next batch makes: the model's version plus 1."""

    @property
    def whole(self) -> bool:
        """Whether the batch is committed, but its step not taken yet."""

    @property
    def outstanding(self) -> bool:
        """Whether a sum is offered, but not decided yet."""

    def at_rest(self) -> AbstractContextManager[None]:
        """Around a wait, during which the training thread does not use the model."""

    def catch_up(self) -> None:
        """Applies versions that the others have committed."""

    def clear(self) -> None:
        """Clears the gradients, since a micro-batch begins."""

    def add(self, units: Ranges, samples: int, *, mine: bool) -> bool:
        """Adds the current gradients, times ``samples``, to the sum if they are ``mine``; False: nothing was added."""

    def left_out(self, units: Ranges, samples: int, *, reason: str) -> None:
        """Notes units of this replica whose gradients will not be in the sum."""

    def empty(self) -> None:
        """Empties the sum, which is void."""

    def offer(self, plan: int, units: Ranges, samples: int) -> None:
        """Offers the sum over ``units``, which has the gradients of ``samples`` samples, as a contribution."""

    def show(self) -> None:
        """Makes the gradient of the whole batch available to the user, before the step."""

    def report(self, state: str, *, unit_s: float) -> None:
        """Reports what the training thread is doing, and its seconds per unit."""


class GlobalBatch:
    """One replica's shares of consecutive batches of ``samples``. Call `next` and `more` on the training thread.

    Args:
        samples: the samples that are shared out.
        at_once: units that `next` returns at most: those of a micro-batch.
        clock: seconds, monotonic.
    """

    def __init__(self, samples: Samples, *, at_once: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.samples, self.at_once = samples, at_once
        self.waited_s = 0.0
        """Seconds that this replica has waited in the batch under way, or the last one."""
        self._clock = clock
        self._changed = Changed()
        self._turn = 0
        self._portion = Portion()
        self._ended = False
        self._closed = False
        self._check: Callable[[], None] = lambda: None
        self._computes: Computes | None = None
        # Training thread only.
        self._ready = 0
        """The version whose step is to be taken."""
        self._dropped = 0
        self._current: tuple[int, Ranges, float] | None = None
        self._broken_off: Ranges = ()
        self._samples_out = 0
        """Samples of the share's units whose gradients were left out of the sum."""
        self._took_s: deque[float] | None = None
        self._unit_s = 0.0
        self._offered: tuple[int, int, Ranges] | None = None

    # ------------------------------------------------------------ the training loop

    def more(self) -> bool:
        """Waits for the next batch; False when the data have ended, or this replica has left. If the loop over a batch
        was broken off, the rest of that batch comes next.

        Raises:
            ftopt.errors.UserError: the step of the last one has not been taken, or this replica has not joined its job.
            ftopt.errors.Refused: the job has refused this replica.
        """
        computes = self._joined()
        self._break_off(computes)
        self.waited_s = 0.0
        while True:
            if computes.whole:
                if self.ready:
                    raise UserError(
                        "the next global batch was asked for before the step of this one; call optimizer.step()"
                    )
                computes.catch_up()
            with self._changed.lock:
                turn = self._turn
                if self._portion.version == computes.version:
                    return True
                if self._ended or self._closed:
                    return False
            self._wait(computes, turn, _LOOK_S)

    def next(self) -> Ranges | None:
        """The next units, whose gradients are to be computed together; adds those of the units before to the sum.

        Blocks when the share is done, until another replica's units are added, or the batch is whole.

        Returns:
            the units; None: the batch is whole, or there is none, since the data have ended or this replica has left.

        Raises:
            ftopt.errors.UserError: this replica has not joined its job.
            ftopt.errors.Refused: the job has refused this replica.
        """
        computes = self._joined()
        self._end_units(computes)
        while not computes.whole:
            with self._changed.lock:
                turn, p = self._turn, self._portion
                planned = p.plan > 0 and p.version == computes.version
                units = p.next(self.at_once) if planned else ()
                share, dropped = (p.version, p.plan, p.units), p.dropped
                if self._closed or (self._ended and not planned):
                    return None
            self._sync(computes, dropped)
            if units:
                computes.report("training", unit_s=self._unit_s)
                computes.clear()
                self._current = (share[0], units, self._clock())
                return units
            again = share == self._offered
            if planned and not computes.outstanding and not again:
                self._offered = share
                computes.offer(share[1], share[2], self.samples.count(share[2]) - self._samples_out)
            self._wait(computes, turn, _AGAIN_S if planned and again and not computes.outstanding else _LOOK_S)
            if again and not computes.outstanding:
                self._offered = None  # the offer was not accepted: a newer plan came, or a state is fetched
        self._ready = computes.version
        computes.show()
        return None

    @property
    def ready(self) -> bool:
        """Whether `next` has ended a whole batch whose step has not been taken."""
        return self._computes is not None and self._ready == self._computes.version

    def put_back(self) -> None:
        """Makes `next` return its last units again, since they have not reached the loop."""
        self._current = None

    def expected(self) -> tuple[Ranges, Ranges]:
        """Units that this replica will compute, to load them ahead: the rest of its share, and the whole share."""
        with self._changed.lock:
            p = self._portion
            return subtract(p.units, p.kept), p.units

    def _joined(self) -> Computes:
        if self._computes is None:
            raise UserError(
                "a global batch was asked for before this replica has joined its job, which shares it out; put the "
                "training loop inside `with optimizer:`"
            )
        return self._computes

    def _end_units(self, computes: Computes) -> None:
        if self._current is None:
            return
        (version, units, began_s), self._current = self._current, None
        self._measure((self._clock() - began_s) / size(units))
        mine = self._add(computes, version, units)
        try:
            if not computes.add(units, self.samples.count(units), mine=mine) and mine:
                self._leave_out(computes, units, "no parameter has a gradient")
        except BaseException:
            with self._changed.lock:
                self._portion.drop()  # the sum may have a part of them
            raise

    def _break_off(self, computes: Computes) -> None:
        """Handles a micro-batch that the loop has left before its end, by ``break`` or an exception. It is computed
        again. The second time it is left out of the batch: the exception may repeat, and others would wait forever."""
        if self._current is None:
            return
        (version, units, _), self._current = self._current, None
        if not intersect(units, self._broken_off):
            self._broken_off = union(self._broken_off, units)
        elif self._add(computes, version, units):
            self._leave_out(computes, units, "the loop has left it before its end, twice")

    def _add(self, computes: Computes, version: int, units: Ranges) -> bool:
        """Whether the units are still this replica's, so that their gradients go into the sum."""
        with self._changed.lock:
            mine, dropped = self._portion.add(version, units), self._portion.dropped
        self._sync(computes, dropped)
        return mine

    def _leave_out(self, computes: Computes, units: Ranges, reason: str) -> None:
        samples = self.samples.count(units)
        self._samples_out += samples
        computes.left_out(units, samples, reason=reason)

    def _measure(self, unit_s: float) -> None:
        """Updates the median of the last few units' times. The very first is left out: it compiles and fills caches."""
        if self._took_s is None:
            self._took_s = deque(maxlen=_MEASURED)
            return
        self._took_s.append(unit_s)
        if len(self._took_s) >= _ENOUGH:
            self._unit_s = statistics.median(self._took_s)

    def _sync(self, computes: Computes, dropped: int) -> None:
        """OWN, TIE: empties the sum when the portion was dropped. ``dropped``: the portion's count when it was read. A
        later plan waits for the next call, or the sum would miss units that the portion counts as kept."""
        if dropped != self._dropped:
            self._dropped, self._samples_out = dropped, 0
            computes.empty()

    def _wait(self, computes: Computes, turn: int, limit_s: float) -> None:
        began_s = self._clock()
        computes.report("waiting", unit_s=self._unit_s)
        with computes.at_rest():
            self._changed.wait_for(lambda: self._turn != turn, limit_s)
        self._check()
        self.waited_s += self._clock() - began_s

    # ------------------------------------------------------------ the optimizer and the client

    def standing(self) -> tuple[int, int]:
        """The newest plan, and the number of units of this replica's share not computed yet. Any thread."""
        with self._changed.lock:
            return self._portion.plan, self._portion.left

    def attend(self, computes: Computes) -> None:
        """Sets the optimizer, which has joined the job."""
        self._computes = computes

    def begin(self, check: Callable[[], None]) -> None:
        """Called when the client starts. ``check``: raises when the job has refused this replica."""
        self._check = check

    def assign(self, plan: Plan) -> None:
        """Takes a plan. Network thread."""
        with self._changed.lock:
            self._ended = plan.ended
            if not plan.ended:
                self._portion.assign(plan.version, plan.plan, plan.units)
        self.poke()

    def reset(self) -> None:
        """Forgets the share, since this incarnation is gone. Network thread."""
        with self._changed.lock:
            self._portion.assign(0, 0, ())
            self._ended = False
        self.poke()

    def poke(self) -> None:
        """Wakes the waiting training thread, since something has changed. Any thread."""
        with self._changed.lock:
            self._turn += 1
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        """Whether the data have ended."""
        return self._ended

    def close(self) -> None:
        """Ends waiting and the batch under way, since this replica leaves or has left. Any thread."""
        self._closed = True
        self.poke()
