"""The wrapper's one mutable object: counting, starting, leaving, and the anchor in the model for a while.

`OuterOptimizer` holds nothing but a `Core`. Trainers subclass wrappers on the fly and copy their
``__dict__``; whatever the wrapper stored on itself would then live twice.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ftopt.common.plural import count
from ftopt.common.tree import Tree
from ftopt.common.weakly import weakly
from ftopt.errors import UserError, warn_user
from ftopt.events import check_not_telling
from ftopt.methods import Method
from ftopt.optimizer.asked import Asked, Leave, leave, left_s
from ftopt.optimizer.counts import NextStep, one_number
from ftopt.optimizer.in_model import LoadedWeights, OuterParameters
from ftopt.optimizer.leaving import (
    FORKED,
    Raised,
    at_exit,
    end_together,
    hand_in,
    not_stepped,
    patience_s,
    tell_joined,
    tell_left,
    tell_not_stepped,
    tell_way_on,
)
from ftopt.optimizer.passed import Passed
from ftopt.optimizer.ranks.alone import Alone, Ranks
from ftopt.optimizer.ranks.loops import unlike
from ftopt.optimizer.saved.capture import Cut, SavedReplica, cut_of
from ftopt.optimizer.saved.loop import Loop
from ftopt.optimizer.saved.replay import Replays
from ftopt.optimizer.saved.restore import Fallback, Resume, start_or_resume
from ftopt.optimizer.schedules import Schedules
from ftopt.optimizer.undo.in_job import LastStep
from ftopt.optimizer.undo.revert import Undone, revert
from ftopt.step.inner import Inner
from ftopt.step.outer.fingerprint import own_lines
from ftopt.step.outer.metrics import told_of_a_step
from ftopt.step.outer.micro_batches import MicroBatches, check_averages_gradients
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.frozen_weights import frozen_lines
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.pool import CopyPool
from ftopt.sync.group import Committed, GlobalBatch, ReplicaGroup

_log = logging.getLogger(__name__)

CLOSED = "this OuterOptimizer was closed; call ftopt.wrap() with a new group to join the job again"
_SPENT_S = 2.0
"""Between two offers of units alone, which are in vain until some replica has steps to go with them."""


@dataclass(frozen=True)
class Standing:
    """Where a replica stands; see the properties of `OuterOptimizer`."""

    started: bool = False
    start_step: int = 0
    inner_step: int = 0
    local_steps: int = 0
    pending_by_fragment: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    committed: Committed | None = None
    cut: Cut | None = None
    stopped: str = ""


class Core:
    """The state of an `OuterOptimizer`.

    Args:
        model, method, group: None in a copy, whose steps are the inner optimizers' alone.
        clock: seconds, monotonic.
        memory: where committed states lie. Default: in RAM.
        undo: record each step, for `undo_step`.
        asked: whether this process is to leave. Default: never.
        ranks: those of the replica, of which this process is one. Default: this process alone.

    Attributes:
        last: the last step, if steps are recorded.
        folder: of the job's checkpoints.
        while_waiting: called now and then while the loader waits for units, after newer states have been applied.
        first_step: the inner step of a new job's version 0.
        planned: at which inner step the loop is to end; 0: not known.
        own_lines: rates and settings of the inner optimizers as they were wrapped, before anything was restored.
        raised: the error that ends the loop.
        before_leaving: called by `close` when everything is handed in, with the seconds that are left.
        before_end: called when this process is asked to leave, before `Leave` ends the user's loop.
    """

    def __init__(
        self,
        inner: Inner,
        model: nn.Module | None = None,
        method: Method | None = None,
        *,
        group: ReplicaGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
        memory: Memory | None = None,
        undo: bool = False,
        asked: Asked | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.inner, self.model, self.method, self.group = inner, model, method, group
        if asked is not None and not asked.watches and ranks is None:  # another rank may watch
            asked = None
        self.ranks: Ranks = Alone(asked, clock) if ranks is None else ranks
        self.outer: OuterStep | None = None
        self.start_step = self.suspended = 0
        self.first_step = self.planned = 0
        self.own_lines = own_lines(inner)
        self.raised = Raised()
        self.closed = self._said_detached = self._forked = False
        self.resume: Resume | None = None
        self.fallback: Fallback | None = None
        self.loop: Loop | None = None
        self.folder: Path | None = None
        self.while_waiting: Callable[[], object] = lambda: None
        self.before_leaving: Callable[[float], object] = lambda timeout_s: None
        self.before_end: Callable[[], object] = lambda: None
        self._clock, self._memory = clock, memory
        self._evaluated = OuterParameters()
        self._by_eval = False  # whether `eval` has put them into the model
        self._rounds_applied = self._nonfinite_drops = self._inner_resets = 0  # as last seen
        self._ended_at: float | None = None
        self._asked = asked
        self.last = LastStep(inner.optimizers) if undo else None
        self.replays: Replays | None = None
        self._spent_at = -math.inf
        self._next = NextStep()
        self.passed, self.schedules = Passed(), Schedules()
        self._loads: LoadedWeights | None = None
        self._micro_batches: MicroBatches | None = None
        self._dropped_at: list[list[int]] | None = None  # the parameters' versions, when user code dropped this object

    def __del__(self) -> None:
        if self.outer is not None and not self.closed:
            at_exit.dropped(self)

    # Stepping.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one inner step, and does what outer work is due after it."""
        if (last := self.last) is not None:
            last.counted = None
        if self.suspended:
            return self.inner.step(closure)
        if self.group is None:
            return self._step_detached(closure)
        if self.group.global_batch is not None:
            return self._step_of_batch(self.group, self.group.global_batch, closure)
        self.inner.check_rates()
        if self.inner.is_empty_step():
            return self.inner.step(closure)
        if self.closed or self._evaluated.there:
            self._check_usable("step()")
        with self.ranks.call("step"):
            if self.outer is None and self.start() and closure is None:
                return None  # The gradient belongs to the parameters that the fetched ones have replaced.
            self.group.check()
            if (loads := self._loads) is not None and loads.begun and self._set_back() and closure is None:
                return None  # Likewise, and to those that were loaded.
            outer = self.outer or self.started()
            if self.schedules.due:
                self._follow_schedules(outer)
            return self._step(outer, self.group, closure)

    def _step(self, outer: OuterStep, group: ReplicaGroup, closure: Callable[[], Any] | None) -> Any:
        if outer.trained is not None:
            outer.trained.check_inner()
        tells = group.tells_steps
        if tells:
            check_not_telling("step()")
            group.emit("inner", inner_step=outer.inner_step() + 1)
        if outer.freezer.in_place or outer.moves:
            self._join(outer)
        if outer.gradients is not None:
            loss = self.inner.evaluate(closure)
            outer.gradients.view.add()
        elif (last := self.last) is None:
            loss = self.inner.step(closure)
        else:
            last.begin(outer)
            loss = self.inner.step(closure)
            last.counted = True
        ended = self._clock()
        if loss is not None and (to_count := self._next).loss is None:
            to_count.loss = one_number(loss)
        step_s = None if self._ended_at is None else ended - self._ended_at
        tokens = self._next.tokens
        counted = self._next.take() if tokens or self._next.samples else None
        told = None if self._next.loss is None else self._next.take_loss()
        outer.count(self.inner.largest_lr, told, step_s, tokens=tokens)
        emitted = ended
        if tells:
            data = told_of_a_step(counted, told, self.inner.largest_lr())
            group.emit("stepped", inner_step=outer.inner_step(), data=data)
            emitted = self._clock()
        self._ended_at = ended
        if self.replays is not None:
            self.replays.stepped(outer)
        if outer.boundary(self.inner.largest_lr):
            self.ranks.push()
            self._after_outer_work(outer)
            stall_s = self._clock() - ended
            group.emit("stall", inner_step=outer.inner_step(), data={"stall_s": stall_s})
            self._ended_at = self._clock() - (emitted - ended)  # the outer step is not part of the next step's time
        if self.replays is not None and self.replays.between(outer):
            self._ended_at = self._clock() - (emitted - ended)
        if outer.doing != "training":
            outer.report("training")
        if self._asked is not None:
            self._leave_if_asked()
        return loss

    def _follow_schedules(self, outer: OuterStep) -> None:
        self.schedules.follow(
            self,
            start_step=self.start_step,
            local_steps=outer.counters.local_steps,
            inner_step=outer.step_to_take(),
        )

    def _leave_if_asked(self) -> None:
        if self.group is not None and (why := self.ranks.why()):
            if self.ranks.rank:
                raise Leave(0)
            leave(self.group.replica, why, self.before_end)

    def _look_while_waiting(self) -> None:
        """The loader waits for units."""
        self.ranks.each("look", self.ranks.look)
        self._leave_if_asked()

    def leave_if_worker_died(self, error: BaseException | None) -> None:
        """Leaves in good order, by `Leave`, if a data loader's worker has died of the signal that asks this process.
        One rank of several does not: others may be in a step that it is not in."""
        if (
            self.ranks.size > 1
            or self._asked is None
            or self.group is None
            or not (why := self._asked.why_worker_died(error))
        ):
            return
        try:
            leave(self.group.replica, f"{why}, which has ended a worker of its data loader, too", self.before_end)
        except Leave:
            self.close(flush=True, timeout_s=left_s())
            raise

    def undo_step(self) -> Undone:
        """Takes the last inner step back; see `ftopt.undo_step`."""
        outer, last = self.outer, self.last
        if self.ranks.size > 1:
            raise UserError("undo_step in a replica of several ranks is not supported; use a replica of one process")
        if last is None:
            raise UserError("undo_step: the steps of this optimizer are not recorded; call ftopt.wrap(..., undo=True)")
        if self.group is None or self.suspended:
            return revert(self.inner.optimizers)
        self._check_usable("undo_step()")
        if outer is None:
            raise UserError("undo_step: there is no step to undo: none has been taken")
        self._set_back()
        self._join(outer)
        undone = last.undo(outer, self.group)
        self._next.forget()
        if self.replays is not None:
            self.replays.undone(outer)
        return undone

    def _step_of_batch(self, group: ReplicaGroup, batch: GlobalBatch, closure: Callable[[], Any] | None) -> None:
        """The inner optimizers' step with the gradient of the global batch."""
        if closure is not None:
            raise UserError(
                "step(closure) in a job with a global batch; compute the gradients in its loop, then step()"
            )
        self._check_usable("step()")
        outer = self.outer
        if outer is None or not (batch.ready and outer.is_whole()):
            raise UserError(
                "step() before the global batch is whole; go through all micro-batches that "
                "`loader.global_batches()` gives, also those that are inherited, and take the step behind their loop; "
                "after an exception in it, go on with the next of `loader.global_batches()`"
            )
        self.inner.check_rates()
        self._checked("step()")
        group.check()
        self._set_back()
        assert self._micro_batches is not None
        self._micro_batches.check_gradients()
        began = self._clock()
        if self.schedules.due:
            self._follow_schedules(outer)
        outer.take_whole(self.inner.largest_lr)
        self._after_outer_work(outer)
        stall_s = batch.waited_s + self._clock() - began
        outer.report("training")
        group.emit("stall", inner_step=outer.inner_step(), data={"stall_s": stall_s})
        self._leave_if_asked()

    def _step_detached(self, closure: Callable[[], Any] | None) -> Any:
        if not self._said_detached:
            self._said_detached = True
            warn_user(
                "this OuterOptimizer is a copy (deepcopy or pickle): it steps its inner optimizer and takes no part in "
                "the job; call ftopt.wrap() to make one that does"
            )
        return self.inner.step(closure)

    def _check_usable(self, what: str) -> None:
        check_not_telling(what)
        if self._forked:
            raise UserError(f"{what}: {FORKED}")
        if self.closed:
            raise RuntimeError(
                f"{what} after close(): this replica has left the job; call ftopt.wrap() with a new group to join anew"
            )
        if self._evaluated.there:
            raise RuntimeError(
                f"{what} while the outer parameters are in the model; leave outer_parameters() first, or call "
                "optimizer.train() after optimizer.eval()"
            )

    def _join(self, outer: OuterStep) -> None:
        """Ends all freezing. Parameters that are not finite are given up, and with them the gradients at hand."""
        if outer.freezer.in_place or outer.moves:
            outer.freezer.join()
            if outer.counters.nonfinite_drops != self._nonfinite_drops:
                self.inner.zero_grad(set_to_none=True)
            self.ranks.push()
            self._after_outer_work(outer)

    def _after_outer_work(self, outer: OuterStep) -> None:
        if self._dropped_at is not None:
            return  # the inner optimizer may be another one's by now
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

    def sync(self) -> bool:
        """Takes part in a round now; see `OuterOptimizer.sync`."""
        if self.outer is not None:
            self._check_usable("sync()")  # on all ranks alike, before any of them does something
        with self._between_steps("sync"):
            outer = self._checked("sync()")
            decided = outer.sync(lr=self.inner.largest_lr())
            self._after_outer_work(outer)
        self._ended_at = None
        return decided

    def settle(self) -> bool:
        """Waits for what is proposed; see `OuterOptimizer.settle`."""
        self.started()
        self._check_usable("settle()")
        with self._between_steps("settle"):
            outer = self._checked("settle()")
            decided = outer.settle()
            self._after_outer_work(outer)
        return decided

    @contextmanager
    def _between_steps(self, call: str, *, checks: bool = True) -> Iterator[None]:
        """Around a call besides the steps, which joins the job unless that is done: the slices are as the model is,
        whatever user code has changed there, and what changes in them goes to the model. ``checks``: what has ended
        the membership is raised first."""
        if self.outer is None and self.closed:
            raise RuntimeError(CLOSED)
        with self.ranks.call(call):
            self.start()
            if not self._evaluated.there:
                if self.group is not None and not self.closed:  # else it has left the job, and has the model still
                    if checks:
                        self.group.check()
                    self._set_back()
                self.ranks.pull()
            yield
            self.ranks.push()

    def _checked(self, what: str) -> OuterStep:
        """The outer step's state, where ``what`` can be done; raises what keeps it from that."""
        outer = self.started()
        self._check_usable(what)
        assert outer.trained is not None
        outer.trained.check()
        return outer

    def load_inner(self, state_dict: dict[str, Any]) -> None:
        """Loads the inner state, unless the replicas have agreed on it."""
        if self.outer is None or self.outer.gradients is None or self.closed:
            self.inner.load_state_dict(state_dict)
            return
        tell_not_loaded(self.method)

    def _before_load(self) -> bool:
        """User code is about to load weights into the model. False: the parameters there are not this replica's."""
        if self.closed or self._evaluated.there:
            return False
        if self.ranks.size == 1:  # one rank alone may load something
            self._join(self.started())
        return True

    def _set_back(self, *, closing: bool = False) -> bool:
        """Replaces weights that user code has loaded; False: none."""
        loads = self._loads
        if loads is None or not loads.loaded():
            return False
        loads.set_back(closing=closing)
        if self.last is not None:
            self.last.counted = None
        return True

    # Starting and leaving.

    def start(self) -> bool:
        """Joins the job unless that is done; True when the parameters came from another replica."""
        if self.outer is not None:
            return False
        check_not_telling("the start")
        self.raised = Raised()
        if self.group is None or self.model is None or self.method is None:
            raise RuntimeError(
                "this OuterOptimizer is a copy (deepcopy or pickle) without a group; call ftopt.wrap() to make one "
                "that takes part in a job"
            )
        if self.closed:
            raise RuntimeError(CLOSED)
        with self.ranks.call("start"):
            return self._start(self.model, self.method, self.group)

    def _start(self, model: nn.Module, method: Method, group: ReplicaGroup) -> bool:
        ranks = self.ranks
        at_exit.check_alone(model)
        at_exit.await_dropped(group.replica)
        self.inner.turn("train")
        if group.global_batch is not None:
            check_averages_gradients(method)
        views, gradients = ranks.views(model, method, self.inner, group)
        outer = OuterStep(
            views, method, group, (self.inner, model), gradients=gradients,
            clock=self._clock, memory=self._memory, refresh=weakly(ranks.pull, None),
        )  # fmt: skip
        if group.sync.frozen == "compare":
            outer.frozen = frozen_lines(model)
        outer.start_step, outer.planned, outer.own_lines = self.first_step, self.planned, self.own_lines
        if group.sync.recover == "replay":
            self.replays = Replays(self.inner, model, group, method, clock=self._clock)
        asked = None if ranks.rank else self._asked  # the others wait for rank 0, and listen when it has joined
        with asked.joining() if asked is not None else nullcontext():
            resume, fallback = ranks.resumed(self.resume, self.fallback)
            self.resume = None
            fetched = start_or_resume(outer, self.inner, model, group, resume, fallback)
        if asked is None and self._asked is not None:
            self._asked.joined()
        self._rounds_applied = outer.counters.rounds_applied
        self.outer = outer
        if self.replays is not None:
            fetched |= self.replays.inherit(outer)
        self.start_step = outer.fragments[0].state.meta.inner_step
        ranks.serve({"rest": self._offer_rest, "loops": self._capture_loop, "capture": self._capture})
        self._loads = ranks.joined(outer, model, weakly(self._before_load, False))
        if not ranks.rank:
            tell_joined(group.replica, group.incarnation, outer.fragments[0].state.meta)
        if group.units is not None:
            group.units.when_out_of_units(weakly(self.offer_rest, None))
            if self._asked is not None:
                group.units.while_waiting(weakly(self._look_while_waiting, None))
        if group.global_batch is not None:
            self._micro_batches = MicroBatches(
                outer, self.inner, group, self._next.take, self._next.take_loss, weakly(self._set_back, False)
            )
            group.global_batch.attend(self._micro_batches)
        outer.report("training")
        at_exit.add(self, keep=ranks.size > 1)  # several cannot leave when one of them has been dropped
        return fetched

    def go_on_from(self, resume: Resume) -> None:
        """Sets what this replica goes on from when it starts, which refuses what does not fit here (`UserError`)."""
        if self.outer is not None:
            raise RuntimeError("resume() after the start; call it before `with optimizer:` and the first step()")
        self.resume = resume

    def cut(self) -> Cut | None:
        """The outer step of fragment 0 that the parameters are based on, if this replica could be saved now.

        None: before the start, while the outer parameters are in the model, or when this replica has fetched that
        version instead of making it.
        """
        return None if self.outer is None or self._evaluated.there else cut_of(self.outer)

    def on_leader(self, call: str, act: Callable[[], bool]) -> bool:
        """Rank 0 does ``act``, for which it may `capture`; its result, on all ranks."""
        return bool(self.ranks.lead(call, act))

    @property
    def saved_model(self) -> nn.Module | None:
        """What names and places a checkpoint's tensors have."""
        return self.ranks.saved_model or self.model

    @property
    def place(self) -> tuple[int, int]:
        """This process' rank in its replica, and how many ranks that has."""
        return self.ranks.rank, self.ranks.size

    def check_included(self, call: str) -> bool:
        """Whether it is known that all ranks' loops have included the same; before the start it is not. UserError: they
        have not."""
        if self.outer is None or self.closed:
            return self.ranks.size == 1
        with self.ranks.call(call):
            found = self.ranks.all(None if self.loop is None else sorted(self.loop.watched))
            for rank, names in enumerate(found):
                if names != found[0]:
                    raise unlike(found[0] or [], names, rank)
        return True

    def capture_loops(self, copies: CopyPool) -> list[Tree]:
        """The loop's state, of each rank; what training changes is copied. Within `on_leader`."""
        found = self.ranks.each("loops", partial(self._capture_loop, copies))
        if isinstance(found, Exception):
            raise found
        return found

    def _capture_loop(self, copies: CopyPool | None = None) -> list[Tree] | Exception:
        assert self.loop is not None
        return self.ranks.capture_loop(self.loop, copies or CopyPool())

    def capture(self, copies: CopyPool) -> SavedReplica:
        """Captures this replica between two inner steps. What training changes is copied into ``copies``. Within
        `on_leader`."""
        return self.ranks.each("capture", partial(self._capture, copies))

    @torch.inference_mode(False)
    def _capture(self, copies: CopyPool | None = None) -> SavedReplica:
        outer = self.started()
        assert self.model is not None
        self._set_back()
        self.ranks.pull()
        self._join(outer)
        return self.ranks.capture(outer, self.inner, self.model, copies or CopyPool(), self.folder)

    def offer_rest(self) -> None:
        """Proposes while the loader waits for units that others hold: the data ends only when all steps are offered."""
        self.ranks.each("rest", self._offer_rest)

    def _offer_rest(self) -> None:
        outer = self.started()
        if self.closed or self._evaluated.there:
            return
        if self.group is not None:
            self.group.check()
        outer.report("out_of_units")
        self._set_back()
        self.ranks.pull()
        with outer.at_rest():
            outer.apply()
            self._propose_rest(outer, spent=self.ranks.same(self._is_spent()))
            if self.ranks.size == 1:
                self.while_waiting()
        self.ranks.push()
        self._ended_at = None

    def _is_spent(self) -> bool:
        """Whether it is time to offer units alone once more."""
        return self._clock() >= self._spent_at + _SPENT_S

    def _propose_rest(self, outer: OuterStep, *, spent: bool) -> None:
        for fragment in outer.fragments:
            if outer.propose_pending(fragment.index, lr=self.inner.largest_lr(), spent=spent) and spent:
                self._spent_at = self._clock()
        self._after_outer_work(outer)

    def standing(self) -> Standing:
        """Where this replica stands."""
        outer = self.outer
        if outer is None:
            return Standing()
        return Standing(
            started=True,
            start_step=self.start_step,
            inner_step=outer.step_to_take(),
            local_steps=outer.counters.local_steps,
            pending_by_fragment=outer.pending_by_fragment(),
            versions=tuple(fragment.state.meta.version for fragment in outer.fragments),
            committed=outer.fragments[0].state.meta,
            cut=self.cut(),
            stopped="" if self.group is None or (stop := self.group.stopped) is None else stop.reason,
        )

    def stop(self, reason: str) -> None:
        """See `OuterOptimizer.stop`."""
        self.started()
        if self.group is not None and not self.closed:
            self.group.stop(reason)

    def anchor_digest(self) -> str:
        """See `OuterOptimizer.anchor_digest`."""
        return self.started().anchor_digest()

    def started(self) -> OuterStep:
        """The outer step's state; RuntimeError before the start."""
        if self.outer is None:
            raise RuntimeError("not started: use `with optimizer:`, or take a first step")
        return self.outer

    def close(self, *, flush: bool, timeout_s: float, early: bool = False) -> None:
        """Leaves the job; see `OuterOptimizer.close`. Of several ranks one may leave without ``flush``, at once."""
        if self.closed or self.group is None:
            return
        check_not_telling("close()")
        self.closed = True
        after = ExitStack()
        try:
            if self.ranks.leaves_whole(flush=flush and self.outer is not None):
                with self.ranks.call("close"):
                    self._leave(self.group, after, flush=flush, timeout_s=timeout_s, early=early)
            else:
                self._keep_loaded(after)
                early = early or self.raised.error() is not None
                self.ranks.part(early=early, reason=self.raised.text())
        finally:
            at_exit.remove(self)
            if self._asked is not None:
                self._asked.left()
            self.ranks.left()
            self.group.close()
            after.close()
            # They refer to this object: with them it would stay until Python collects it.
            self.before_leaving, self.while_waiting, self.fallback = lambda timeout_s: None, lambda: None, None

    def _keep_loaded(self, after: ExitStack) -> None:
        """Weights that were loaded last are in the model again ``after`` all."""
        if self._loads is not None and (loaded := self._loads.keep()) is not None:
            after.callback(loaded)

    def _leave(self, group: ReplicaGroup, after: ExitStack, *, flush: bool, timeout_s: float, early: bool) -> None:
        """Hands in what is pending, unless ``flush`` is False, and says goodbye."""
        self.exit_outer()
        if (outer := self.outer) is None:
            return
        ranks = self.ranks
        self._keep_loaded(after)
        decided_s, now_s = min(timeout_s, patience_s(group)), ranks.now_s()
        deadline, decided_by = ranks.same((now_s + timeout_s, now_s + decided_s))
        if flush and not group.closed:
            group.check()
        self._set_back(closing=True)
        ranks.pull()
        if not_stepped(outer) and not ranks.rank:
            tell_not_stepped(group.replica)
        dropped = self._dropped_at is not None
        if not dropped:  # else user code does with the model what it likes
            after.enter_context(outer.at_rest())
        reason = "its optimizer was dropped without close()" if dropped else self.raised.why_at_once(early=early)
        asked = bool(ranks.why())  # one that a signal reaches later has come to its end before
        early = ranks.same(early or asked)
        if flush:
            self._hand_in(outer, group, decided_by, early=early)
            reason = group.obstacle() or f"no round has taken them within {decided_s:g} s"
            ranks.push()  # what is saved now begins with the slices as the model is
            self.before_leaving(max(0.0, deadline - ranks.now_s()))
        else:
            outer.report("leaving")
        early = ranks.same(early or self.raised.error() is not None)
        if not early:
            group.finish()
        wait_s = max(0.0, decided_by - ranks.now_s()) if flush else 0.0
        group.leave(timeout_s=wait_s, early=early, reason=self.raised.text())
        if flush and not group.closed:
            group.check()
        if flush or not dropped:  # else a gradient would step the inner optimizer, in the user's model
            outer.apply()
        self._after_outer_work(outer)
        ranks.push()
        if not ranks.rank:
            tell_left(outer, group.replica, reason)
            if asked or self.raised.interrupted(flush=flush):
                tell_way_on(outer, group.replica)
        ranks.leave()

    def _hand_in(self, outer: OuterStep, group: ReplicaGroup, deadline: float, *, early: bool) -> None:
        """Offers what is pending to round after round, until it is decided, or until ``deadline`` by rank 0's clock."""
        ranks = self.ranks
        with outer.at_rest():
            hand_in(outer, group, self.inner.largest_lr, deadline, ranks.now_s, early=early)
            dropped = self._dropped_at is not None  # its model gets no final version
            if not ranks.same(early or dropped or self.raised.error() is not None):
                but, timeout_s = at_exit.beside(self), max(0.0, deadline - ranks.now_s())
                tell = end_together(outer, group, but=but, timeout_s=timeout_s, until=lambda: self._is_asked)
                if not ranks.rank:
                    tell()
        self._after_outer_work(outer)  # before anything is saved

    @property
    def _is_asked(self) -> bool:
        return self._asked is not None and bool(self._asked.why())

    def announce(self) -> None:
        """Tells the job that this replica leaves: no round waits for it. One that leaves early opens one first."""
        if self.outer is not None and not self.closed and not self._is_asked:
            self.outer.report("leaving")

    def note_dropped(self) -> None:
        """See `LeavesAlone`."""
        self._dropped_at = [fragment.view.versions() for fragment in self.started().fragments]

    def part_from_model(self) -> str:
        """See `LeavesAlone`."""
        outer = self.started()
        assert self.group is not None
        self.before_leaving = lambda timeout_s: None  # a checkpoint would read the model
        if outer.gradients is not None or self.group.global_batch is not None:
            if self._loads is not None:
                self._loads.keep()
                self._loads = None  # what was loaded stays in the model
            return "the replicas take their steps together"
        versions = [fragment.view.part_from_model() for fragment in outer.fragments]
        if self._evaluated.there:
            self._evaluated.take_out()
            self._by_eval = False
        elif versions != self._dropped_at:
            return "the parameters have been changed since"
        return ""

    def disown(self) -> None:
        """See `Leaver`."""
        self.closed = self._forked = True

    @property
    def trains(self) -> tuple[nn.Module | None, str]:
        """Its model, and the replica that it is."""
        return self.model, "" if self.group is None else self.group.replica

    def unfinished(self) -> str:
        """Whose steps are pending, and how many; "": none."""
        pending = 0 if self.outer is None or self.group is None else max(self.outer.pending_by_fragment())
        return (
            f"replica {self.group.replica} has {count(pending, 'inner step')} pending" if pending and self.group else ""
        )

    def count(self, *, tokens: int, samples: int, loss: float | Tensor | None) -> None:
        """Adds to what the next step uses; its loss. UserError: more than can be counted."""
        life = 0 if self.outer is None else self.outer.counters.tokens
        self._next.add(tokens, samples, loss, life=life)

    # What the user is doing, and the anchor in the model.

    def report(self, state: str) -> None:
        """Reports what the user's loop does; nothing before the start or after the end."""
        self._ended_at = None
        if self.outer is not None and not self.closed:
            self.outer.report(state)

    def eval(self) -> None:
        """See `OuterOptimizer.eval`."""
        if self.outer is None:
            self.inner.turn("eval")
        elif not (self.closed or self._evaluated.there):
            self.enter_outer()
            self._by_eval = True
            self.inner.turn("eval", keep=True)

    def train(self) -> None:
        """See `OuterOptimizer.train`."""
        if self._by_eval:
            self.exit_outer()
        elif not (self.closed or self._evaluated.there):
            self.inner.turn("train")

    def enter_outer(self) -> bool:
        """Puts the committed anchor into the model until `exit_outer`; the replica's parameters are kept aside. False:
        `eval` has put it there, and `train` takes it out. RuntimeError: it is there already."""
        check_not_telling("outer_parameters()")
        if self._by_eval:
            return False
        if self._evaluated.there:
            raise RuntimeError("the outer parameters are in the model already; leave outer_parameters() first")
        with self._between_steps("outer_parameters", checks=self.ranks.size > 1):
            outer = self.started()
            self._join(outer)
            # Of a method that averages parameters, too: else the model itself is the committed state.
            live = outer.gradients.live if outer.gradients is not None and len(outer.fragments) > 1 else None
            self._evaluated.put(outer.fragments, live)
        self.report("evaluating")
        return True

    def exit_outer(self) -> None:
        """Puts the replica's parameters back, bit for bit, unless they are there."""
        if self._by_eval:
            self._by_eval = False
            self.inner.turn("train", keep=True)
        if not self._evaluated.there:
            return
        if self.ranks.size > 1 and (error := sys.exc_info()[1]) is not None and not self.closed:
            _log.error(
                "rank %d of replica %s: outer_parameters() is left by an error, and waits for the other ranks: %r",
                self.ranks.rank, self.trains[1], error,
            )  # fmt: skip
        with self._between_steps("outer_parameters"):
            self._evaluated.take_out()
        self.report("training")


def tell_not_loaded(method: Method | None) -> None:
    """The inner state that user code wants to load is not taken."""
    warn_user(
        f"the inner optimizer's state is not loaded: the replicas of {method} have it alike, and take each step "
        "together; load it before `with optimizer:`, on all replicas, or resume the job from its checkpoint "
        "(ftopt.Checkpoints)"
    )
