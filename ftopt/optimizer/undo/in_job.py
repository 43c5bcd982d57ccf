"""Takes the last inner step out of a replica's books again, as long as no contribution holds it."""

from __future__ import annotations

from collections.abc import Sequence

from ftopt.errors import UserError
from ftopt.optimizer.outer.step import OuterStep
from ftopt.optimizer.undo.record import StepRecorder
from ftopt.sync.group import Committed


class LastStep:
    """A replica's last inner step, and how the books stood before it.

    Args:
        outer: the books.
        logs: of the inner optimizers. None: its steps cannot be undone anyway.

    Attributes:
        counted: the step has been taken and counted; False: it has raised; None: there is none to be undone.
    """

    def __init__(self, outer: OuterStep, logs: Sequence[StepRecorder | None]) -> None:
        self.counted: bool | None = None
        self._outer = outer
        self._logs = logs
        self._recorded = [log for log in logs if log is not None]
        self._taken: list[Committed] = []
        self._tokens, self._tally = outer.tokens, outer.totals
        self._looks_again = True

    def begin(self) -> None:
        """A step begins; every one pays for this."""
        for log in self._recorded:
            log.steps = 0
        if self._looks_again:
            # What the parameters are based on; not the states themselves, which would live on with it.
            self._taken = [fragment.taken.meta for fragment in self._outer.fragments]
            self._looks_again = False
        self._tokens, self._tally = self._outer.tokens, self._outer.totals
        self.counted = False

    def look_again(self) -> None:
        """Outer work has been done: what is noted of parameters and inner states need not hold for the next step."""
        self._looks_again = True
        for log in self._recorded:
            log.look_again()

    def reached(self) -> list[bool]:
        """Which inner optimizers the step has come to.

        Raises:
            UserError: the step is not this replica's own any more, or not the last one, or there is none.
        """
        if self.counted is None:
            raise UserError(
                "undo_step: there is no step to undo: none has been taken, or the last one is undone already"
            )
        if any(log.steps > 1 for log in self._recorded):
            raise UserError(
                "undo_step: an inner optimizer has been stepped by itself since; a replica's last step alone"
            )
        step = self._outer.local_steps
        for fragment, taken in zip(self._outer.fragments, self._taken, strict=True):
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
        return [log is not None and log.steps == 1 for log in self._logs]

    def uncount(self) -> None:
        """The books as they stood before the step."""
        self._outer.local_steps -= 1
        self._outer.tokens, self._outer.totals = self._tokens, self._tally
