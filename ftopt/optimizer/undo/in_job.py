"""A replica's last inner step, which can be undone while no contribution holds it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.undo.record import record_steps
from ftopt.optimizer.undo.revert import Undone, revert
from ftopt.step.outer.step import OuterStep
from ftopt.sync.group import Committed, ReplicaGroup


class LastStep:
    """The last inner step, and the outer step's counters before it.

    Attributes:
        counted: the step has been taken and counted; False: it has raised; None: there is none to undo.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.counted: bool | None = None
        self._optimizers = optimizers
        self._recorders = [record_steps(optimizer) for optimizer in optimizers]
        self._applied: list[Committed] = []  # the state on which each fragment's parameters are based

    def begin(self, outer: OuterStep) -> None:
        """Records the counters and versions before a step."""
        for recorder in self._recorders:
            recorder.steps = 0
        self._applied = [fragment.applied.meta for fragment in outer.fragments]  # the states would be kept alive
        self._before = outer.counters.counted()
        self.counted = False

    def undo(self, outer: OuterStep, group: ReplicaGroup) -> Undone:
        """Undoes the step, and removes it from the outer step's counters. UserError: nothing has changed."""
        counted = self._check(outer)
        undone = revert(self._optimizers, [recorder.steps == 1 for recorder in self._recorders])
        self.counted = None
        if counted:
            outer.counters.uncount(self._before)
            if group.units is not None:
                group.units.unuse()
            outer.report("training")
            group.emit("undone", inner_step=outer.inner_step(), data={"steps": 1})
        return undone

    def _check(self, outer: OuterStep) -> bool:
        """Whether the step has been counted; UserError if it cannot be removed from the counters."""
        if self.counted is None:
            raise UserError(
                "undo_step: there is no step to undo: none has been taken, or the last one is undone already"
            )
        if any(recorder.steps > 1 for recorder in self._recorders):
            raise UserError(
                "undo_step: an inner optimizer has been stepped by itself since; only a replica's last step can be "
                "undone"
            )
        step = outer.counters.local_steps
        for fragment, before in zip(outer.fragments, self._applied, strict=True):
            if self.counted and max(fragment.snapshot_step, fragment.base.step) >= step:
                raise UserError(
                    f"undo_step: inner step {step} is in what this replica has proposed last (fragment "
                    f"{fragment.index}), and others may have counted it; only steps after a proposal can be undone"
                )
            if self.counted and fragment.applied.meta is not before:
                raise UserError(
                    f"undo_step: an outer step (fragment {fragment.index}) has moved the parameters since inner step "
                    f"{step}; undo a step before the next outer step"
                )
        return self.counted
