"""The variables of an outer step for one fragment, and the only code that writes them: one method per transition.

============  ================  ========================================================================
``state``     network, worker   the committed state; replaced as a whole, never changed
``result``    reducer           what `Reduction.reduce` computed and no one has decided yet
``applied``   training          the committed state that the model's parameters are based on
``start``     training          ``cast(applied.anchor)``
``snapshot``  all               the frozen contribution with the parameters it was taken from (FREEZE)
``base``      all               what the pending work is measured from, see `Base`
============  ================  ========================================================================

``base`` moves in three cases: to the snapshot when that is counted, to ``cast(anchor)`` when a state is applied (the
parameters move by the same amount), and to ``cast(anchor)`` with the parameters when steps are dropped. Until the
training thread applies the newer state, it still measures ``params - base`` from the old ``base``: for the parameters
nothing has been counted yet. `pending` returns that view, and a checkpoint saves it.

An audit of I2 reads only this file and ``counters.py``. While a newer state waits to be applied there is no snapshot,
since `commit` and `install` free it, so nothing moves ``base`` while the training thread applies it. Tensors are never
touched under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from torch import Tensor

from ftopt.methods import Method, OuterState, Round
from ftopt.step.outer.counters import Counters
from ftopt.step.outer.error_feedback import Residual
from ftopt.step.outer.frozen import Assumed, Frozen
from ftopt.step.outer.state import Base, CommittedState, Pending, Snapshot, check_fetched
from ftopt.step.outer.trigger_metrics import TriggerMetrics
from ftopt.step.outer.usual import Sizes, resembles, usual_of
from ftopt.step.tensors.buffers import joined
from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import AttemptView, Committed, Contribution

_DROPS = 2
"""After this many drops in a row, accept similar work: one drop rules out a flipped bit, two rule out a bad batch,
which is used again once."""
_BAD_ROUNDS = 2
"""Bad rounds in a row after which the pending work and the inner state are dropped: a replica gets a second chance."""


class Fragment:
    """The variables of one fragment. All code may read them; only this class writes them.

    Args:
        state: the initial committed state, made from the present parameters.
        by_job: whether replicas take the same steps, with agreed gradients. Triggers then count the job's inner steps,
            not this replica's; steps pending here are also in the others' parameters, and in the next anchor whoever
            makes it.

    Attributes:
        carries_over: whether pending work can move to a newer version; if not, a newer version drops it.
        keeps_still: whether its values change only in an inner step.
        residuals: error feedback by the payload's units: the codec's error in all counted contributions.
        reset: whether applying the state drops the pending work, since this replica was declared gone.
        bad_rounds: rounds in a row in which this replica's contribution was out of line or not finite.
        condemned: why the pending work must be dropped, after it was out of line twice; "": it need not be.
        assumed: the properties of the last round that affect the payload.
        trigger_from_step, trigger_from_s: when triggers began to count: at the last proposal, or when a state was
            applied that counts no steps of this replica.
        ask_from: the first local step at which the fragment can be due.
        snapshot_step: the local step of the last snapshot.
        apply_step: the local step at which the result of the last snapshot is waited for and applied.
        pace: inner steps per second over the last contribution.
    """

    carries_over = True
    keeps_still = True

    def __init__(
        self, view: FlatView, method: Method, state: CommittedState, counters: Counters, *, by_job: bool = False
    ) -> None:
        self.view, self.method = view, method
        self.trigger_metrics = TriggerMetrics(view, method.timing.uses)
        self.index = state.meta.fragment
        self.timing, self.overlap = method.timing, method.overlap
        self.state = self.applied = state
        self.start = view.cast(state.anchor)
        self.base = Base(self.start, 0, 0, counters.totals, state.meta.version)
        self.snapshot: Snapshot | None = None
        self.result: CommittedState | None = None
        self.residuals: Mapping[str, Residual] = {}
        self.reset = False
        self._unused = (0, "")
        self.bad_rounds, self.condemned = 0, ""
        self.assumed = Assumed()
        self.pace: float | None = None
        self.by_job = by_job
        self._counters, self._lock = counters, threading.Lock()
        self._sizes: Sizes | None = None  # of the last contribution
        self._dropped: Sizes | None = None  # of work dropped for being out of line
        self._alone = False  # whether nobody else's work was in line either
        self._drops = 0  # number in a row
        self._period = None if by_job else self.timing.fixed_period
        self._before: Pending | None = None  # the work before a newer state came, until that is applied
        self._left_out: Mapping[str, Residual] | None = None  # the `residuals` once the snapshot is counted
        self.restart_trigger(0, 0.0)
        self.note_snapshot(0)

    # Reading. Any thread.

    @property
    def pending_steps(self) -> int:
        """Inner steps of this replica that no committed state has counted, without dropped ones."""
        return self.steps_since(self.base)

    def steps_since(self, base: Base) -> int:
        """Inner steps of this replica after ``base``."""
        return self._counters.local_steps - base.step

    def inner_step(self) -> int:
        """The committed inner step plus the pending ones."""
        with self._lock:
            return self.state.meta.inner_step + self.pending_steps

    def applied_inner_step(self) -> int:
        """The same, as the training thread sees it: a newer state counts when it is applied."""
        with self._lock:
            return self.applied.meta.inner_step + self.steps_since(self._pending().base)

    def pending(self) -> Pending:
        """The pending work as the training thread sees it, on ``applied``."""
        with self._lock:
            return self._pending()

    def to_apply(self) -> tuple[CommittedState, Base, bool]:
        """The newest state, the base of the pending work, and whether that work must be dropped."""
        with self._lock:
            return self.state, self.base, self.reset

    def waits_for(self, frozen: Frozen) -> bool:
        """Whether the contribution of these parameters is undecided."""
        with self._lock:
            return self.snapshot is not None and self.snapshot.params is frozen

    def serve(self) -> tuple[str, dict[str, Tensor]]:
        """The committed state for a peer: digest and tensors. LookupError: it is not available at the moment."""
        return self.state.digest, self.state.tensors()

    def awaited(self) -> AbstractContextManager[None]:
        """Surrounds calls of `serve` that wait for the training thread; here none do."""
        return nullcontext()

    def check(self, committed: Committed, digest: str, tensors: Mapping[str, Tensor], memory: Memory) -> CommittedState:
        """A peer's answer as a state, in ``memory``. ValueError: it is damaged, or not of this model."""
        return check_fetched(self.state, committed, digest, tensors, self.view).placed(memory)

    def joined(
        self, anchor: Tensor, outer: OuterState, on: CommittedState, mean: Tensor, round: Round
    ) -> tuple[Tensor, OuterState]:
        """A whole fragment's next anchor and outer state.

        Args:
            anchor, outer: the method's result for the part that trains.
            on: the present state.
            mean: of the whole fragment; may be overwritten.
        """
        return joined(anchor, on.anchor, mean, round), outer

    def unmoved(self, state: CommittedState) -> OuterState:
        """The next outer state when no contribution weighs anything."""
        return state.outer

    def _pending(self) -> Pending:
        if self.state is not self.applied and self._before is not None:
            return self._before
        return Pending(self.base, self.snapshot, self.residuals)

    # Steps 3 to 5, on the reducer and the network thread.

    def begin_attempt(self) -> tuple[CommittedState, Snapshot | None]:
        """Drops the previous attempt's result; returns the state and snapshot for the new one."""
        with self._lock:
            self.result = None
            return self.state, self.snapshot

    def assume(self, assumed: Assumed) -> None:
        """Notes the round's properties that affect the payload, probably the same in the next round."""
        self.assumed = assumed

    def leave_out(self, units: str, residual: Residual) -> None:
        """Notes the codec's error in the contribution being reduced."""
        with self._lock:
            if self.snapshot is not None:
                self._left_out = {**self.residuals, units: residual}

    def forget_residuals(self) -> None:
        """Drops the accumulated codec error."""
        with self._lock:
            self.residuals, self._left_out = {}, None

    def prepare(self, result: CommittedState, on: CommittedState) -> None:
        """Keeps the result computed from ``on``, unless a newer state has come."""
        with self._lock:
            if self.state is on:
                self.result = result

    def compared(self, version: int, on: CommittedState) -> tuple[str, float]:
        """Digest and largest absolute value of the live state that members must share besides the committed state
        ``on``, if an attempt for ``version`` compares it; here nothing."""
        return "", 0.0

    def exclude(self, reason: str, *, void: bool) -> None:
        """Notes that a round was decided without this replica's contribution, which was out of line. ``void``: all
        were."""
        with self._lock:
            self.bad_rounds += 1
            self._alone = void
            if self.bad_rounds >= _BAD_ROUNDS:
                self.condemned = reason

    def discard_result(self) -> None:
        """Drops the result of a failed attempt; the snapshot stays (FREEZE)."""
        with self._lock:
            self.result = None

    def commit(self, attempt: AttemptView, committed: Committed) -> None:
        """Makes the result of ``attempt`` the committed state."""
        with self._lock:
            result = self.result
            if result is None or result.made is None or result.made.attempt != attempt.attempt:
                assert self.state.meta.version >= committed.version, "a commit without its result"
                return
            self._advance(replace(result, meta=committed, made=attempt))

    def begin(self, committed: Committed, *, reset: bool) -> None:
        """Makes the committed state another version."""
        self.install(replace(self.state, meta=committed, fetched=True, made=None), reset=reset)

    def install(self, state: CommittedState, *, reset: bool) -> None:
        """Makes a fetched state the committed one."""
        with self._lock:
            self._advance(state)
            self.reset = self.reset or reset

    def _advance(self, state: CommittedState) -> None:
        """Replaces the state, which decides whether the snapshot is counted and becomes the base."""
        if self.state is self.applied:
            self._before = self._pending()
        snapshot, self.snapshot, self.result = self.snapshot, None, None
        if snapshot is not None and self._is_counted(snapshot.contribution, state):
            # In place: the training thread waits, nothing is pending, and the base's parameters are not read.
            params = self.start.new_empty(0) if snapshot.params.copy is None else snapshot.params.copy
            self.base = Base(params, snapshot.until, snapshot.tokens, snapshot.totals, state.meta.version)
            if snapshot.contribution.finite and snapshot.contribution.steps:
                self.bad_rounds, self._dropped, self._drops = 0, None, 0
            if snapshot.unused and not self.carries_over:  # else they were dropped at freezing
                self._unused = (self._unused[0] + snapshot.contribution.steps, snapshot.unused)
            if self._left_out is not None:
                self.residuals, self._left_out = self._left_out, None
        self.state = state

    def take_unused(self) -> tuple[int, str]:
        """Counted steps that are not in the mean of their global batch, and the reason; each is returned once."""
        with self._lock:
            unused, self._unused = self._unused, (0, "")
            return unused

    def _is_counted(self, contribution: Contribution, state: CommittedState) -> bool:
        weightless = not contribution.steps and contribution.last_step < self.snapshot_step  # its steps stay pending
        return contribution.last_step <= state.meta.counted_step and not weightless

    # Steps 1 and 6, on the training thread.

    def offer(self, snapshot: Snapshot, on: CommittedState) -> bool:
        """Keeps the snapshot taken on ``on``; False if a newer state has come, which voids it."""
        with self._lock:
            if self.state is not on:
                return False
            self.snapshot = snapshot
            return True

    def note_sizes(self, own: Sizes, on: CommittedState, ratio: float) -> bool:
        """Notes the sizes of a contribution about to be offered; returns whether similar work was dropped before."""
        self._sizes = own
        return self._drops >= _DROPS and resembles(own, self._dropped, usual_of(on.outer), ratio)

    def count_nonfinite(self) -> bool:
        """Notes that the pending work is not finite; returns whether the previous work was in line."""
        with self._lock:
            self.bad_rounds += 1
            return self.bad_rounds < _BAD_ROUNDS

    def note_snapshot(self, step: int, pace: float | None = None) -> None:
        """Notes ``step`` as that of the last snapshot; its result is applied ``delay`` steps later."""
        self.snapshot_step, self.apply_step = step, step + self.overlap.delay
        self.pace = pace or self.pace

    def restart_trigger(self, step: int, now_s: float) -> None:
        """Restarts the triggers' counts at this step and this second."""
        self.trigger_from_step, self.trigger_from_s = step, now_s
        self.ask_from = 0 if self._period is None else step + self._period

    def since_frozen(self) -> tuple[Frozen | Tensor, int]:
        """The parameters at the start of the work that no outstanding contribution holds, and its steps."""
        with self._lock:
            snapshot, local_steps = self.snapshot, self._counters.local_steps
            if snapshot is None:
                return self.base.params, local_steps - self.base.step
            return snapshot.params, local_steps - snapshot.until

    def discard(self, steps: int) -> None:
        """Drops ``steps`` pending steps: the oldest, or all that no outstanding contribution holds."""
        with self._lock:
            base, snapshot, counters = self._without(self.base, steps), self.snapshot, self._counters
            if snapshot is not None:  # the steps after it are dropped
                tokens, totals = counters.tokens, counters.totals
                snapshot = replace(snapshot, until=counters.local_steps, tokens=tokens, totals=totals)
            self.base, self.snapshot = base, snapshot

    def _without(self, base: Base, steps: int) -> Base:
        """``base`` moved past the oldest ``steps`` pending steps."""
        counters, step = self._counters, base.step + steps
        tokens = base.tokens + (counters.tokens - base.tokens) * steps // max(1, counters.local_steps - base.step)
        totals = counters.totals if steps and step == counters.local_steps else base.totals
        return replace(base, step=step, tokens=tokens, totals=totals)  # tokens: the average

    def apply(self, state: CommittedState, start: Tensor, *, nothing_pending: bool, dropped: int) -> None:
        """Bases the parameters on ``state``, in one transition; ``start`` is its anchor, cast. The ``dropped`` oldest
        pending steps are dropped."""
        with self._lock:
            base, reset = self._without(self.base, dropped), self.reset and self.state is not state
            base = replace(base, params=start, version=state.meta.version if nothing_pending else base.version)
            self.start, self.base, self.applied, self._before, self.reset = start, base, state, None, reset

    def pardon(self, *, dropped: bool) -> None:
        """Clears the condemned state: the pending work is ``dropped``, or was not at fault."""
        with self._lock:
            # If peers were in line, the work was at fault, however often it recurs.
            like = self._sizes if dropped and self._alone else None
            drops = self._drops + 1 if like is not None else 0
            self.bad_rounds, self.condemned, self._dropped, self._drops = 0, "", like, drops

    def repair(self, state: CommittedState) -> None:
        """Replaces the damaged applied state by a sound one, from which pending work is then measured, unless a newer
        one has come."""
        start = self.view.cast(state.anchor)
        with self._lock:
            if self.state is self.applied:
                self.state = self.applied = state
                self.start, self.base = start, replace(self.base, params=start)

    def replace_newest(self, damaged: CommittedState, sound: CommittedState) -> bool:
        """Replaces the newest state, which is not applied yet; False if it has been replaced already."""
        with self._lock:
            found = self.state is damaged
            if found:
                self.state = sound
            return found

    def follow(self, state: CommittedState) -> None:
        """Does further work for a state that is being applied; here nothing."""

    # At the start. Training thread, before other threads read, unless said otherwise.

    def start_at(self, meta: Committed) -> None:
        """Gives the initial state its ``meta``, unless the reducer is working on another one. Any thread."""
        with self._lock:
            if self.state is self.applied:
                self.state = self.applied = replace(self.state, meta=meta)

    def stand_on(self, state: CommittedState) -> None:
        """Makes ``state`` both the committed state and the one that the parameters are based on; nothing is frozen."""
        self.state = self.applied = state
        self.reset = False
        self.start = self.view.cast(state.anchor)
        self.base, self.snapshot = replace(self.base, params=self.start), None

    def restore(self, pending: Pending) -> None:
        """Replaces the pending work, which the parameters already contain. Any thread."""
        with self._lock:
            self.base, self.snapshot, self.residuals = pending.base, pending.snapshot, pending.residuals
            if self._before is not None:
                self._before = pending
