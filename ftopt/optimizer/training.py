"""The state that all parts of a wrapped optimizer share: this replica's training, and the work between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from ftopt.errors import UserError
from ftopt.events import check_not_telling
from ftopt.methods import Method
from ftopt.optimizer.asked import Asked
from ftopt.optimizer.counts import NextStep
from ftopt.optimizer.ending.at_exit import Raised
from ftopt.optimizer.in_model import LoadedWeights, OuterParameters
from ftopt.optimizer.ranks.alone import Alone, Ranks
from ftopt.optimizer.saved.replay import Replays
from ftopt.optimizer.schedules import Schedules
from ftopt.optimizer.undo.in_job import LastStep
from ftopt.step.inner import Inner
from ftopt.step.outer.step import OuterStep
from ftopt.sync.group import ReplicaGroup

CLOSED = "this ReplicaOptimizer was closed; call ftopt.wrap() with a new group to join the job again"
_FORKED = (
    "this process was forked from the one that has joined the job: the membership stays there; train there, or connect "
    "and wrap in this process"
)


class Training:
    """The training of this replica. It does not refer to the parts that use it, so that these are freed when the user
    drops the optimizer.

    Args:
        model, method, group: None in a copy, whose steps are only the inner optimizers'.
        clock: seconds, monotonic.
        undo: record each step, for `undo_step`.
        asked: whether this process is asked to leave. Default: never.
        ranks: the replica's ranks, including this process. Default: this process alone.

    Attributes:
        outer: the outer step; None before the start.
        suspended: the number of `ReplicaOptimizer.suspended` blocks around the loop.
        closed: it has left its job, or its membership belongs to the process from which this one was forked.
        forked: the latter.
        dropped: user code has dropped the optimizer, whose model and inner optimizers may belong to another one now.
        anchor: the committed anchor, while it is in the model.
        loads: the weights that user code loads into the model.
        last: the last step, if steps are recorded.
        counted: the user's counts for the next step.
        ended_at: the end of the last inner step; None: do not measure the next step from there.
        raised: the error that ends the loop.
    """

    def __init__(
        self,
        inner: Inner,
        model: nn.Module | None = None,
        method: Method | None = None,
        *,
        group: ReplicaGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
        undo: bool = False,
        asked: Asked | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.inner, self.model, self.method, self.group = inner, model, method, group
        if asked is not None and not asked.watches and ranks is None:  # else another rank may watch
            asked = None
        self.asked, self.clock = asked, clock
        self.ranks: Ranks = Alone(asked, clock) if ranks is None else ranks
        self.outer: OuterStep | None = None
        self.suspended = 0
        self.closed = self.forked = self.dropped = False
        self.anchor, self.counted, self.schedules = OuterParameters(), NextStep(), Schedules()
        self.loads: LoadedWeights | None = None
        self.last = LastStep(inner.optimizers) if undo else None
        self.replays: Replays | None = None
        self.ended_at: float | None = None
        self.raised = Raised()
        self._rounds_applied = self._nonfinite_drops = self._inner_resets = 0  # values last seen

    def started(self) -> OuterStep:
        """The outer step's state; RuntimeError before the start."""
        if self.outer is None:
            raise RuntimeError("not started: use `with optimizer:`, or take a first step")
        return self.outer

    @property
    def trains(self) -> tuple[nn.Module | None, str]:
        """Its model and its replica's id."""
        return self.model, "" if self.group is None else self.group.replica

    def check_usable(self, what: str) -> None:
        """Raises the error that forbids user code ``what``, if any."""
        check_not_telling(what)
        if self.forked:
            raise UserError(f"{what}: {_FORKED}")
        if self.closed:
            raise RuntimeError(
                f"{what} after close(): this replica has left the job; call ftopt.wrap() with a new group to join anew"
            )
        if self.anchor.there:
            raise RuntimeError(
                f"{what} while the global parameters are in the model; leave global_parameters() first, or call "
                "optimizer.train() after optimizer.eval()"
            )

    def checked(self, what: str) -> OuterStep:
        """The outer step's state if ``what`` is allowed; else raises the error that forbids it."""
        outer = self.started()
        self.check_usable(what)
        assert outer.trained is not None
        outer.trained.check()
        return outer

    def report(self, state: str) -> None:
        """Reports the activity of the user's loop; does nothing before the start or after the end."""
        self.ended_at = None
        if self.outer is not None and not self.closed:
            self.outer.report(state)

    @contextmanager
    def between_steps(self, call: str, start: Callable[[], object], *, checks: bool = True) -> Iterator[None]:
        """Surrounds a call other than a step, and calls ``start`` first. Updates the slices from the model before the
        call, in case user code has changed it, and the model from the slices afterwards. ``checks``: first raise an
        error that has ended the membership."""
        if self.outer is None and self.closed:
            raise RuntimeError(CLOSED)
        with self.ranks.call(call):
            start()
            if not self.anchor.there:
                if self.group is not None and not self.closed:  # else it has left the job but still has the model
                    if checks:
                        self.group.check()
                    self.set_back()
                self.ranks.pull()
            yield
            self.ranks.push()

    def before_load(self) -> bool:
        """Prepares for weights that user code is about to load into the model. False: the model does not hold this
        replica's parameters."""
        if self.closed or self.anchor.there:
            return False
        if self.ranks.size == 1:  # with several, one rank alone may load weights
            self.finish_freezing(self.started())
        return True

    def set_back(self, *, closing: bool = False) -> bool:
        """Replaces weights that user code has loaded; False: there are none."""
        loads = self.loads
        if loads is None or not loads.loaded():
            return False
        loads.set_back(closing=closing)
        if self.last is not None:
            self.last.counted = None
        return True

    def finish_freezing(self, outer: OuterStep) -> None:
        """Ends all freezing. If parameters that are not finite are dropped, clears the present gradients, too."""
        if outer.freezer.in_place or outer.moves:
            outer.freezer.join()
            if outer.counters.nonfinite_drops != self._nonfinite_drops:
                self.inner.zero_grad(set_to_none=True)
            self.ranks.push()
            self.after_outer_work(outer)

    def begin(self, outer: OuterStep) -> None:
        """Called when the replica has joined its job."""
        self._rounds_applied = outer.counters.rounds_applied
        self.outer = outer

    def after_outer_work(self, outer: OuterStep) -> None:
        """Updates the inner optimizers and the schedules after changes by outer steps."""
        if self.dropped:
            return  # the inner optimizer may belong to another one now
        self.schedules.due = True
        counters = outer.counters
        if counters.nonfinite_drops != self._nonfinite_drops:
            self.inner.forget_nonfinite_state()
            self._nonfinite_drops = counters.nonfinite_drops
        if counters.inner_resets != self._inner_resets:
            if outer.live is None:  # else it is part of the committed state
                self.inner.reset_state()
            self._inner_resets = counters.inner_resets
        if counters.rounds_applied != self._rounds_applied:
            if self.method is not None and self.method.inner_state == "reset":
                self.inner.reset_state()
            self._rounds_applied = counters.rounds_applied
            if self.replays is not None and not self.closed:
                self.replays.copy(outer)
