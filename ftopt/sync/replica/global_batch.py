"""A replica's share of the global batch under way, for its loader and its optimizer.

Between two threads: the training thread computes unit after unit and offers the sum, the network thread brings plans.
When a replica fails, a newer plan adds units to what was offered: `GlobalBatch.next` goes on with them, and ends when
the batch is committed.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ftopt.errors import UserError
from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.ledger.plans import Portion
from ftopt.sync.protocol.messages import Plan
from ftopt.sync.protocol.samples import Samples

_AGAIN_S = 0.05
_LOOK_S = 1.0
_MEASURED = 9
_ENOUGH = 3


class Computes(Protocol):
    """What a `GlobalBatch` asks of the optimizer. Training thread."""

    @property
    def version(self) -> int:
        """What the next batch makes: one above the version that the model is of."""

    @property
    def whole(self) -> bool:
        """Whether the batch is committed, and its step not taken yet."""

    @property
    def outstanding(self) -> bool:
        """Whether a sum is offered and not decided yet."""

    def catch_up(self) -> None:
        """Applies what the others have committed."""

    def clear(self) -> None:
        """A unit begins: no gradients are at hand."""

    def add(self, unit: int, samples: int, *, mine: bool) -> None:
        """The gradients at hand, times ``samples``, belong into the sum if they are ``mine``."""

    def empty(self) -> None:
        """The sum is void."""

    def offer(self, plan: int, units: Ranges, samples: int) -> None:
        """The sum is that of ``units``: a contribution."""

    def report(self, state: str, *, unit_s: float) -> None:
        """What the training thread is doing, and how long a unit takes it."""


class GlobalBatch:
    """One replica's share of one batch of ``samples`` after the other. `next` and `more`: on the training thread."""

    def __init__(self, samples: Samples, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.samples = samples
        self.waited_s = 0.0
        """How long this replica has waited in the batch under way, or the last one."""
        self._clock = clock
        self._changed = threading.Condition()
        self._turn = 0
        self._portion = Portion()
        self._ended = False
        self._closed = False
        self._check: Callable[[], None] = lambda: None
        self._computes: Computes | None = None
        # Training thread only.
        self._begun = 0
        self._dropped = 0
        self._unit: tuple[int, int, float] | None = None
        self._took_s: deque[float] | None = None
        self._unit_s = 0.0
        self._offered: tuple[int, int, Ranges] | None = None

    # ------------------------------------------------------------ the training loop

    def more(self) -> bool:
        """Waits for the next batch; False when the data have ended, or this replica has left.

        Raises:
            ftopt.errors.UserError: the step of the last one has not been taken, or this replica has not joined its job.
            ftopt.errors.Refused: the job has refused this replica.
        """
        computes = self._joined()
        self.waited_s = 0.0
        while True:
            if computes.whole:
                if self._begun == computes.version:
                    raise UserError(
                        "the next global batch was asked for before the step of this one; call optimizer.step()"
                    )
                computes.catch_up()
            with self._changed:
                turn = self._turn
                if self._portion.version == computes.version:
                    return True
                if self._ended or self._closed:
                    return False
            self._wait(computes, turn, _LOOK_S)

    def next(self) -> int | None:
        """The next unit to compute the gradients of; those of the last one are taken into the sum.

        Blocks when the share is done, until another replica's units are added, or the batch is whole.

        Returns:
            None: the batch is whole; or there is none, since the data have ended or this replica has left.

        Raises:
            ftopt.errors.UserError: this replica has not joined its job.
            ftopt.errors.Refused: the job has refused this replica.
        """
        computes = self._joined()
        self._begun = computes.version
        self._end_unit(computes)
        while not computes.whole:
            with self._changed:
                turn, p = self._turn, self._portion
                planned = p.plan > 0 and p.version == computes.version
                unit = p.next() if planned else None
                share = (p.version, p.plan, p.units)
                if self._closed or (self._ended and not planned):
                    return None
            self._sync(computes)
            if unit is not None:
                computes.report("training", unit_s=self._unit_s)
                computes.clear()
                self._unit = (share[0], unit, self._clock())
                return unit
            again = share == self._offered
            if planned and not computes.outstanding and not again:
                self._offered = share
                computes.offer(share[1], share[2], self.samples.count(share[2]))
            self._wait(computes, turn, _AGAIN_S if planned and again and not computes.outstanding else _LOOK_S)
            if again and not computes.outstanding:
                self._offered = None  # it was not taken: a newer plan, or a state that is fetched
        return None

    def _joined(self) -> Computes:
        if self._computes is None:
            raise UserError(
                "a global batch was asked for before this replica has joined its job, which shares it out; put the "
                "training loop inside `with optimizer:`"
            )
        return self._computes

    def _end_unit(self, computes: Computes) -> None:
        if self._unit is None:
            return
        (version, unit, began_s), self._unit = self._unit, None
        self._measure(self._clock() - began_s)
        with self._changed:
            mine = self._portion.add(version, unit)
        self._sync(computes)
        computes.add(unit, len(self.samples.positions(unit)), mine=mine)

    def _measure(self, unit_s: float) -> None:
        """The median of the last few, if there are. The very first is left out, which compiles and fills caches."""
        if self._took_s is None:
            self._took_s = deque(maxlen=_MEASURED)
            return
        self._took_s.append(unit_s)
        if len(self._took_s) >= _ENOUGH:
            self._unit_s = statistics.median(self._took_s)

    def _sync(self, computes: Computes) -> None:
        """OWN, TIE: the sum is void when the portion says so."""
        with self._changed:
            dropped = self._portion.dropped
        if dropped != self._dropped:
            self._dropped = dropped
            computes.empty()

    def _wait(self, computes: Computes, turn: int, limit_s: float) -> None:
        began_s = self._clock()
        computes.report("waiting", unit_s=self._unit_s)
        with self._changed:
            self._changed.wait_for(lambda: self._turn != turn, limit_s)
        self._check()
        self.waited_s += self._clock() - began_s

    # ------------------------------------------------------------ the optimizer and the client

    def attend(self, computes: Computes) -> None:
        """The optimizer has joined the job."""
        self._computes = computes

    def begin(self, check: Callable[[], None]) -> None:
        """The client starts. ``check``: raises when the job has refused this replica."""
        self._check = check

    def assign(self, plan: Plan) -> None:
        """A plan. Network thread."""
        with self._changed:
            self._ended = plan.ended
            if not plan.ended:
                self._portion.assign(plan.version, plan.plan, plan.units)
        self.poke()

    def reset(self) -> None:
        """This incarnation is gone. Network thread."""
        with self._changed:
            self._portion.assign(0, 0, ())
            self._ended = False
        self.poke()

    def poke(self) -> None:
        """Something has changed. Any thread."""
        with self._changed:
            self._turn += 1
            self._changed.notify_all()

    def close(self) -> None:
        """This replica has left: waiting ends."""
        self._closed = True
        self.poke()
