"""Takes the last inner step out of a replica's books again, as long as no contribution holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftopt.errors import UserError
from ftopt.optimizer.gauge import Tally
from ftopt.optimizer.outer_step import OuterStep
from ftopt.optimizer.step_log import StepLog
from ftopt.sync.group import Committed

Logs = Sequence[StepLog | None]
"""Of the inner optimizers. None: its steps cannot be undone anyway."""


@dataclass(slots=True)
class LastStep:
    """How the books stood before an inner step.

    Args:
        tokens: counted by then.
        tally: sums for triggers by then.
        taken: what each fragment's parameters were based on; not the states themselves, which would live on with it.
        begun: steps that each inner optimizer's log knew of.
        counted: the step has been taken and counted; False: it has raised.
    """

    tokens: int
    tally: Tally
    taken: list[Committed]
    begun: list[int]
    counted: bool = False

    @classmethod
    def before(cls, outer: OuterStep, logs: Logs) -> LastStep:
        """As they stand now."""
        return cls(outer.tokens, outer.tally, [f.taken.meta for f in outer.fragments], _begun(logs))

    def reached(self, outer: OuterStep, logs: Logs) -> list[bool]:
        """Which inner optimizers the step has come to.

        Raises:
            UserError: the step is not this replica's own any more, or not the last one.
        """
        more = [now - then for now, then in zip(_begun(logs), self.begun, strict=True)]
        if any(steps > 1 for steps in more):
            raise UserError(
                "undo_step: an inner optimizer has been stepped by itself since; a replica's last step alone"
            )
        step = outer.local_steps
        for fragment, taken in zip(outer.fragments, self.taken, strict=True):
            if self.counted and max(fragment.snapshot_step, fragment.base_step) >= step:
                raise UserError(
                    f"undo_step: inner step {step} is in what this replica has proposed last (fragment "
                    f"{fragment.index}), and others may have counted it; only steps behind a proposal can be undone"
                )
            if self.counted and fragment.taken.meta is not taken:
                raise UserError(
                    f"undo_step: an outer step (fragment {fragment.index}) has moved the parameters since inner step "
                    f"{step}; undo a step before the next outer step"
                )
        return [steps == 1 for steps in more]

    def uncount(self, outer: OuterStep) -> None:
        """The books as they stood, if the step was in them."""
        if self.counted:
            outer.local_steps -= 1
            outer.tokens, outer.tally = self.tokens, self.tally


def _begun(logs: Logs) -> list[int]:
    return [0 if log is None else log.steps for log in logs]
