"""A replica's counts of its own inner steps, and the only code that writes them.

Invariant I2, each survivor's inner step is counted exactly once, needs three numbers per fragment: ``local_steps``
here, ``base.step`` and ``state.meta.counted_step`` of the fragment. The first changes only in this file, the others
only in ``fragment.py``, so an audit of I2 reads these two files. A test enforces this.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_RECENT = 16
_BREAKS = 2
"""The number of longest steps among the last `_RECENT` that are left out, since they may include an evaluation."""
_RATE_BITS = 200
"""Rates are summed as integers in units of 2^-200: exactly, so that the mean of equal rates is that rate."""


class StepTotals(NamedTuple):
    """Sums over the inner steps so far: ``losses`` over ``counted`` steps, ``seconds`` over ``timed`` ones,
    ``rates`` over ``rated`` ones."""

    losses: float | Tensor = 0.0
    counted: int | Tensor = 0
    seconds: float = 0.0
    timed: int = 0
    rates: int = 0
    rated: int = 0

    def plus(self, lr: float, loss: float | Tensor | None, step_s: float | None) -> StepTotals:
        """Adds one step, with its loss if that is finite, and its duration in seconds if known."""
        losses, counted = self.losses, self.counted
        if isinstance(loss, Tensor):  # not read here; a loss that is not finite would stay in all later sums
            if isinstance(losses, Tensor) and losses.is_cuda and loss.is_cuda:  # a model on several GPUs
                loss = loss.to(losses.device, non_blocking=True)
            losses = losses + torch.nan_to_num(loss.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)
            counted = counted + torch.isfinite(loss).long()
        elif loss is not None and math.isfinite(loss):
            losses, counted = losses + loss, counted + 1
        seconds, timed = self.seconds + (step_s or 0.0), self.timed + (step_s is not None)
        rates, rated = self.rates, self.rated
        if math.isfinite(lr):
            rates, rated = rates + int(math.ldexp(lr, _RATE_BITS)), rated + 1
        return StepTotals(losses, counted, seconds, timed, rates, rated)

    def pace(self, since: StepTotals) -> float | None:
        """Steps per second after ``since``; None if no time was measured."""
        seconds = self.seconds - since.seconds
        return (self.timed - since.timed) / seconds if seconds > 0 else None

    def mean_rate(self, since: StepTotals) -> float | None:
        """The mean of the rates of the steps after ``since``, rounded once; None if there are none."""
        rated = self.rated - since.rated
        return (self.rates - since.rates) / (rated << _RATE_BITS) if rated else None

    def mean_loss(self, since: StepTotals) -> float | None:
        """The mean of the losses counted after ``since``; None if there are none."""
        counted = int(self.counted - since.counted)
        mean = float(self.losses - since.losses) / counted if counted else math.nan
        return mean if math.isfinite(mean) else None


class Counters:
    """Counts of one replica in this life. Written on the training thread, read on any.

    Attributes:
        local_steps: inner steps, of which each fragment has counted or dropped those up to its ``base.step``.
        tokens: tokens in them.
        uncounted: steps for which no tokens were counted.
        totals: sums over them, for triggers.
        step_s: seconds per step: the mean of the last 16, without the two longest; 0 before the first measurement.
        rounds_applied: committed contributions of this replica whose result has been applied.
        nonfinite_drops: how often pending steps were dropped because they were not finite.
        inner_resets: how often out-of-line pending steps required a reset of the inner state.
        resumed: whether the counts continue those of a checkpoint.
        planned: the inner step of the job at which the loop will end; 0: not known.
    """

    def __init__(self) -> None:
        self.uncounted = self.planned = 0
        self.local_steps = self.tokens = self.rounds_applied = 0
        self.nonfinite_drops = self.inner_resets = 0
        self.totals = StepTotals()
        self._recent_s: tuple[float, ...] = ()
        self.resumed = False

    def plan(self, planned: int) -> None:
        """Notes where the loop will end."""
        self.planned = planned

    def count_step(self, tokens: int, step_s: float | None) -> None:
        """Counts an inner step; ``step_s``: seconds since the previous one, if nothing else was done in between."""
        recent_s = self._recent_s if step_s is None else (*self._recent_s[1 - _RECENT :], step_s)
        counts = self.local_steps + 1, self.tokens + tokens, self.uncounted + (not tokens), recent_s
        self.local_steps, self.tokens, self.uncounted, self._recent_s = counts  # at once, in case of an exception

    @property
    def step_s(self) -> float:
        recent_s = sorted(self._recent_s)
        usual_s = recent_s[: max(1, len(recent_s) - _BREAKS)]
        return sum(usual_s) / len(usual_s) if usual_s else 0.0

    def add_to_totals(self, lr: float, loss: float | Tensor | None, step_s: float | None) -> None:
        """Adds the step just counted to ``totals``."""
        self.totals = self.totals.plus(lr, loss, step_s)

    def counted(self) -> tuple[int, int, StepTotals]:
        """The counts at present, for `uncount`."""
        return self.local_steps, self.tokens, self.totals

    def uncount(self, before: tuple[int, int, StepTotals]) -> None:
        """Removes the last step: restores the counts ``before`` it."""
        self.local_steps, self.tokens, self.totals = before

    def set_step_s(self, seconds: float) -> None:
        """Sets the seconds per step where they are measured elsewhere."""
        self._recent_s = (seconds,)

    def count_applied_round(self) -> None:
        """Counts a committed contribution of this replica whose result has been applied."""
        self.rounds_applied += 1

    def count_nonfinite_drop(self) -> None:
        """Counts a drop of non-finite pending steps."""
        self.nonfinite_drops += 1

    def count_inner_reset(self) -> None:
        """Counts a reset of the inner state, a possible cause when pending steps are bad for the second time in a
        row."""
        self.inner_resets += 1

    def add_tokens(self, tokens: int) -> None:
        """Adds tokens to steps that are counted already: those of an island's other ranks."""
        self.tokens += tokens

    def adopt(self, steps: int, tokens: int) -> None:
        """Adds inner steps that another replica, or another incarnation of this one, took and that are pending here."""
        self.local_steps += steps
        self.tokens += tokens

    def capture(self) -> dict[str, Any]:
        """The counts for a checkpoint."""
        counts = {"local_steps": self.local_steps, "tokens": self.tokens, "rounds_applied": self.rounds_applied}
        return counts | {"totals": self.totals._asdict()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restores a `capture`."""
        self.local_steps, self.tokens = saved["local_steps"], saved["tokens"]
        self.totals, self.rounds_applied = StepTotals(**saved["totals"]), saved["rounds_applied"]
        self.resumed = True
