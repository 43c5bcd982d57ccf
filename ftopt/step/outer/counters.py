"""A replica's counts of its own inner steps, and the only code that writes them.

Invariant I2, each survivor's inner step is counted exactly once, needs three numbers a fragment: ``local_steps`` here,
``base.step`` and ``state.meta.counted_step`` of the fragment. The first changes in this file alone, the others in
``fragment.py`` alone, so that these two files are what an audit of I2 reads. A test keeps it so.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_RECENT = 16
_BREAKS = 2
"""The longest steps among the last `_RECENT`, which do not count: an evaluation or the like came in between."""
_RATE_BITS = 200
"""Rates are added up in units of 2^-200, as whole numbers: exactly, so that the mean of equal rates is that rate."""


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
        """Adds one step; its loss, if that is finite, and how many seconds it took, when that is known."""
        losses, counted = self.losses, self.counted
        if isinstance(loss, Tensor):  # not read here; one that is not finite would stay in all sums to come
            if isinstance(losses, Tensor) and losses.is_cuda and loss.is_cuda:  # of a model on several cards
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
        """Steps a second after ``since``; None when no time was measured."""
        seconds = self.seconds - since.seconds
        return (self.timed - since.timed) / seconds if seconds > 0 else None

    def mean_rate(self, since: StepTotals) -> float | None:
        """The mean of the rates of the steps after ``since``, rounded once; None when there are none."""
        rated = self.rated - since.rated
        return (self.rates - since.rates) / (rated << _RATE_BITS) if rated else None

    def mean_loss(self, since: StepTotals) -> float | None:
        """The mean of the losses counted after ``since``; None when there are none."""
        counted = int(self.counted - since.counted)
        mean = float(self.losses - since.losses) / counted if counted else math.nan
        return mean if math.isfinite(mean) else None


class Counters:
    """Counts of one replica in this life. Written on the training thread, read on any.

    Attributes:
        local_steps: inner steps, of which each fragment has counted or dropped those up to its ``base.step``.
        tokens: tokens in them.
        uncounted: steps of which no tokens were counted.
        totals: sums over them, for triggers.
        step_s: seconds that a step takes: the mean of the last 16, without the two longest; 0 before one was measured.
        rounds_applied: commits of a contribution of this replica that its parameters have followed.
        nonfinite_drops: how often pending steps were dropped because they were not finite.
        inner_resets: how often the inner state was to be given up, with pending steps that were out of line.
        resumed: they continue those of a checkpoint.
    """

    def __init__(self) -> None:
        self.uncounted = 0
        self.local_steps = self.tokens = self.rounds_applied = 0
        self.nonfinite_drops = self.inner_resets = 0
        self.totals = StepTotals()
        self._recent_s: tuple[float, ...] = ()
        self.resumed = False

    def count_step(self, tokens: int, step_s: float | None) -> None:
        """Counts an inner step; ``step_s``: seconds since the one before, if nothing else was done in between."""
        recent_s = self._recent_s if step_s is None else (*self._recent_s[1 - _RECENT :], step_s)
        counts = self.local_steps + 1, self.tokens + tokens, self.uncounted + (not tokens), recent_s
        self.local_steps, self.tokens, self.uncounted, self._recent_s = counts  # at once: whatever is raised in between

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
        """Takes the last step out: sets the counts to those ``before`` it."""
        self.local_steps, self.tokens, self.totals = before

    def set_step_s(self, seconds: float) -> None:
        """Sets how long a step takes, where that is measured elsewhere."""
        self._recent_s = (seconds,)

    def count_applied_round(self) -> None:
        """Counts a commit of this replica's contribution that the parameters have followed."""
        self.rounds_applied += 1

    def count_nonfinite_drop(self) -> None:
        """Counts a drop of pending steps that are not finite."""
        self.nonfinite_drops += 1

    def count_inner_reset(self) -> None:
        """Counts pending steps that were bad for the second time in a row: the cause may be in the inner state."""
        self.inner_resets += 1

    def add_tokens(self, tokens: int) -> None:
        """Tokens of steps that are counted already: those of an island's other ranks."""
        self.tokens += tokens

    def adopt(self, steps: int, tokens: int) -> None:
        """Adds inner steps that another replica, or another life of this one, has taken and that are pending here."""
        self.local_steps += steps
        self.tokens += tokens

    def capture(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        counts = {"local_steps": self.local_steps, "tokens": self.tokens, "rounds_applied": self.rounds_applied}
        return counts | {"totals": self.totals._asdict()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restores a `capture`."""
        self.local_steps, self.tokens = saved["local_steps"], saved["tokens"]
        self.totals, self.rounds_applied = StepTotals(**saved["totals"]), saved["rounds_applied"]
        self.resumed = True
