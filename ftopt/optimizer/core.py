"""The wrapper's one mutable object: an inner step with the outer work that is due after it.

`ReplicaOptimizer` holds nothing but a `Core`. Trainers subclass wrappers on the fly and copy their ``__dict__``, which
would duplicate any state of the wrapper itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ftopt.errors import UserError, warn_user
from ftopt.events import check_not_telling
from ftopt.optimizer.counts import Passed, Status, one_number
from ftopt.optimizer.evaluating import Evaluating
from ftopt.optimizer.joining import Joining
from ftopt.optimizer.leaving import Leaving
from ftopt.optimizer.saved.capture import Cut
from ftopt.optimizer.saving import Saving
from ftopt.optimizer.training import Training
from ftopt.optimizer.undo.revert import Undone, revert
from ftopt.step.outer.metrics import data_of_step
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import Committed, GlobalBatch, ReplicaGroup


@dataclass(frozen=True)
class Standing(Status):
    """A `Status` with what only ftopt itself reads."""

    committed: Committed | None = None
    cut: Cut | None = None


class Core:
    """The state of an `ReplicaOptimizer`, in parts that do not refer to it.

    Args:
        training: the state that all parts share.
        memory: memory of committed states. Default: in RAM.

    Attributes:
        joining, evaluating, leaving: the calls of the user's loop besides steps.
        saving: the interface for checkpoints.
        passed: the loop's questions about multiples of the job's inner step.
    """

    def __init__(self, training: Training, *, memory: Memory | None = None) -> None:
        self.training, self.ranks, self.schedules, self.passed = training, training.ranks, training.schedules, Passed()
        self.inner, self.model, self.method, self.group = (
            training.inner, training.model, training.method, training.group,
        )  # fmt: skip
        self.saving, self.evaluating = Saving(training), Evaluating(training)
        self.leaving = Leaving(training, self.evaluating, self.saving)
        self.joining = Joining(training, self.saving, self.leaving, memory=memory)
        self._warned_detached = False
        this = weakref.ref(self)
        self.saving.before_loop = lambda: None if (core := this()) is None else core.follow_schedules()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one inner step, and does the outer work due after it."""
        training, group = self.training, self.group
        if (last := training.last) is not None:
            last.counted = None
        if training.suspended:
            return self.inner.step(closure)
        if group is None:
            return self._step_detached(closure)
        if group.global_batch is not None:
            return self._step_of_batch(group, group.global_batch, closure)
        self.inner.check_rates()
        if self.inner.is_empty_step():
            return self.inner.step(closure)
        if training.closed or training.anchor.there:
            training.check_usable("step()")
        with self.ranks.call("step"):
            if training.outer is None and self.start() and closure is None:
                return None  # The gradient belongs to parameters that fetched ones have replaced.
            group.check()
            if (loads := training.loads) is not None and loads.begun and training.set_back() and closure is None:
                return None  # It belongs to loaded parameters, which the replica's own have replaced.
            outer = training.outer or training.started()
            if self.schedules.due:
                self._follow_schedules(outer, group)
            return self._step(training, outer, group, closure)

    def _step(
        self, training: Training, outer: OuterStep, group: ReplicaGroup, closure: Callable[[], Any] | None
    ) -> Any:
        clock, counts = training.clock, training.counted
        if outer.trained is not None:
            outer.trained.check_inner()
        tells = group.tells_steps
        if tells:
            check_not_telling("step()")
            group.emit("inner", inner_step=outer.inner_step() + 1)
        if outer.freezer.in_place or outer.moves:
            training.finish_freezing(outer)
        if outer.gradients is not None:
            loss = self.inner.evaluate(closure)
            outer.gradients.view.add()
        elif (last := training.last) is None:
            loss = self.inner.step(closure)
        else:
            last.begin(outer)
            loss = self.inner.step(closure)
            last.counted = True
        ended = clock()
        if loss is not None and counts.loss is None:
            counts.loss = one_number(loss)
        step_s = None if training.ended_at is None else ended - training.ended_at
        tokens = counts.tokens
        counted = counts.take() if tokens or counts.samples else None
        loss_counted = None if counts.loss is None else counts.take_loss()
        outer.count(self.inner.largest_lr, loss_counted, step_s, tokens=tokens)
        emitted = ended
        if tells:
            data = data_of_step(counted, loss_counted, self.inner.largest_lr())
            group.emit("stepped", inner_step=outer.inner_step(), data=data)
            emitted = clock()
        training.ended_at = ended
        if training.replays is not None:
            training.replays.stepped(outer)
        if outer.boundary(self.inner.largest_lr):
            self.ranks.push()
            training.after_outer_work(outer)
            stall_s = clock() - ended
            group.emit("stall", inner_step=outer.inner_step(), data={"stall_s": stall_s})
            training.ended_at = clock() - (emitted - ended)  # excludes the outer step from the next step's time
        if training.replays is not None and training.replays.between(outer):
            training.ended_at = clock() - (emitted - ended)
        if outer.doing != "training":
            outer.report("training")
        if training.asked is not None:
            self.leaving.if_asked()
        return loss

    def follow_schedules(self) -> None:
        """Brings schedules to the job's inner step, if it has moved otherwise than by this replica's steps."""
        outer, group = self.training.outer, self.group
        if self.schedules.due and self.schedules.known and outer is not None and group is not None:
            self._follow_schedules(outer, group)

    def _follow_schedules(self, outer: OuterStep, group: ReplicaGroup) -> None:
        self.schedules.follow(
            self,
            self.inner,
            group.replica,
            start_step=self.joining.start_step,
            local_steps=outer.counters.local_steps,
            inner_step=outer.step_to_take(),
        )

    def _step_of_batch(self, group: ReplicaGroup, batch: GlobalBatch, closure: Callable[[], Any] | None) -> None:
        """The inner optimizers' step with the gradient of the global batch."""
        training = self.training
        if closure is not None:
            raise UserError(
                "step(closure) in a job with a global batch; compute the gradients in its loop, then step()"
            )
        training.check_usable("step()")
        outer = training.outer
        if outer is None or not (batch.ready and outer.is_whole()):
            raise UserError(
                "step() before the global batch is whole; go through all micro-batches that "
                "`loader.global_batches()` gives, also those that are inherited, and take the step after their loop; "
                "after an exception in it, go on with the next of `loader.global_batches()`"
            )
        self.inner.check_rates()
        training.checked("step()")
        group.check()
        training.set_back()
        assert self.joining.micro_batches is not None
        self.joining.micro_batches.check_gradients()
        began = training.clock()
        if self.schedules.due:
            self._follow_schedules(outer, group)
        outer.take_whole(self.inner.largest_lr)
        training.after_outer_work(outer)
        stall_s = batch.waited_s + training.clock() - began
        outer.report("training")
        group.emit("stall", inner_step=outer.inner_step(), data={"stall_s": stall_s})
        self.leaving.if_asked()

    def _step_detached(self, closure: Callable[[], Any] | None) -> Any:
        if not self._warned_detached:
            self._warned_detached = True
            warn_user(
                "this ReplicaOptimizer is a copy (deepcopy or pickle): it steps its inner optimizer and takes no part "
                "in the job; call ftopt.wrap() to make one that does"
            )
        return self.inner.step(closure)

    def undo_step(self) -> Undone:
        """Undoes the last inner step; see `ftopt.undo.undo_step`."""
        training = self.training
        outer, last = training.outer, training.last
        if self.ranks.size > 1:
            raise UserError("undo_step in a replica of several ranks is not supported; use a replica of one process")
        if last is None:
            raise UserError("undo_step: the steps of this optimizer are not recorded; call ftopt.wrap(..., undo=True)")
        if self.group is None or training.suspended:
            return revert(self.inner.optimizers)
        training.check_usable("undo_step()")
        if outer is None:
            raise UserError("undo_step: there is no step to undo: none has been taken")
        training.set_back()
        training.finish_freezing(outer)
        undone = last.undo(outer, self.group)
        training.counted.forget()
        if training.replays is not None:
            training.replays.undone(outer)
        return undone

    def sync(self) -> bool:
        """Takes part in a round now; see `ReplicaOptimizer.sync`."""
        training = self.training
        if training.outer is not None:
            training.check_usable("sync()")  # on all ranks, before any of them changes something
        with training.between_steps("sync", self.start):
            outer = training.checked("sync()")
            decided = outer.sync(lr=self.inner.largest_lr())
            training.after_outer_work(outer)
        training.ended_at = None
        return decided

    def settle(self) -> bool:
        """Waits for proposed contributions; see `ReplicaOptimizer.sync`."""
        training = self.training
        training.started()
        training.check_usable("sync()")
        with training.between_steps("settle", self.start):
            outer = training.checked("sync()")
            decided = outer.settle()
            training.after_outer_work(outer)
        return decided

    def start(self) -> bool:
        """Joins the job unless it has joined; True if the parameters came from another replica."""
        return self.joining.start()

    def started(self) -> OuterStep:
        """The outer step's state; RuntimeError before the start."""
        return self.training.started()

    @property
    def closed(self) -> bool:
        """Whether this replica has left its job."""
        return self.training.closed

    def standing(self) -> Standing:
        """Where this replica stands."""
        outer = self.training.outer
        if outer is None:
            return Standing()
        return Standing(
            started=True,
            start_step=self.joining.start_step,
            inner_step=outer.step_to_take(),
            local_steps=outer.counters.local_steps,
            pending_steps=outer.pending_by_fragment(),
            versions=tuple(fragment.state.meta.version for fragment in outer.fragments),
            committed_step=outer.fragments[0].state.meta.inner_step,
            counted_step=outer.fragments[0].state.meta.counted_step,
            replaying=self.training.replays is not None and self.training.replays.under_way is not None,
            committed=outer.fragments[0].state.meta,
            cut=self.saving.cut(),
            stopped="" if self.group is None or (stop := self.group.stopped) is None else stop.reason,
        )

    def stop(self, reason: str) -> None:
        """See `ReplicaOptimizer.stop`."""
        self.started()
        if self.group is not None and not self.training.closed:
            self.group.stop(reason)

    def load_inner(self, state_dict: dict[str, Any]) -> None:
        """Loads the inner state, unless the replicas have agreed on it."""
        outer = self.training.outer
        if outer is None or outer.gradients is None or self.training.closed:
            self.inner.load_state_dict(state_dict)
            return
        warn_user(
            f"the inner optimizer's state is not loaded: the replicas of {self.method} have it alike, and take each "
            "step together; load it before `with optimizer:`, on all replicas, or resume the job from its checkpoint "
            "(ftopt.Checkpoints)"
        )

    def count(self, *, tokens: int, samples: int, loss: float | Tensor | None) -> None:
        """Adds to the next step's counts, and sets its loss. UserError: more than can be counted."""
        life = 0 if self.training.outer is None else self.training.outer.counters.tokens
        self.training.counted.add(tokens, samples, loss, life=life)
