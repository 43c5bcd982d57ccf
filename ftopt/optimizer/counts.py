"""What a training loop tells and asks: counts of a step, checked on the caller's thread, periodic actions, and where
its replica stands."""

from __future__ import annotations

import logging
import operator
from collections.abc import Hashable
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from ftopt.errors import UserError

_log = logging.getLogger(__name__)
MAX_COUNT = (1 << 53) - 1
"""The largest whole number that every JSON implementation carries exactly."""
IDLE_PASSES, SPUN_PASSES = 10_000, 100_000
"""Passes of a loop over inner steps without a step: a warning; an error, if so many spin. Accumulation takes fewer."""
_SPIN_S = 0.001


def check_idle(passes: int, planned: int, took_s: float) -> None:
    """Warns of a loop whose passes take no step; the last `SPUN_PASSES` ``took_s``. UserError: it would never end, as
    passes of less than a millisecond neither train nor wait for something."""
    told = f"steps({planned}): {passes:,} passes in a row have not called step() of the wrapped optimizer"
    if passes >= SPUN_PASSES and took_s < SPUN_PASSES * _SPIN_S:
        raise UserError(f"{told}; call optimizer.step() in the loop, not the inner optimizer's")
    _log.warning("%s; the loop ends when the job has taken its inner steps", told)


class NextStep:
    """The user's counts for the next step.

    Attributes:
        tokens, samples: counted so far.
        loss: one number, not read here; None: not given.
    """

    def __init__(self) -> None:
        self.tokens = self.samples = 0
        self.loss: float | Tensor | None = None

    def add(self, tokens: int, samples: int, loss: float | Tensor | None, *, life: int) -> None:
        """Adds to the counts. UserError: more than can be counted, together with the tokens of this incarnation
        (``life``)."""
        for what, sum_ in (("tokens", life + self.tokens + tokens), ("samples", self.samples + samples)):
            if sum_ > MAX_COUNT:
                raise UserError(f"log(): {sum_} {what} in all; at most 2^53 - 1 can be counted; mend what counts them")
        self.tokens += tokens
        self.samples += samples
        self.loss = self.loss if loss is None else loss

    def take(self) -> dict[str, int]:
        """Takes the tokens and samples for the present step, and resets them."""
        counted = {"tokens": self.tokens, "samples": self.samples}
        self.tokens = self.samples = 0
        return counted

    def take_loss(self) -> float | Tensor | None:
        """Takes the loss for the present step, and resets it."""
        loss, self.loss = self.loss, None
        return loss

    def forget(self) -> None:
        """Drops the counts, since their step is undone."""
        self.tokens, self.samples, self.loss = 0, 0, None


class Passed:
    """For each question of a loop, the multiple that the job's inner step had passed when it was last asked."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}

    def ask(self, question: Hashable, every: int, *, start_step: int, inner_step: int) -> bool:
        """Whether the inner step has passed a multiple of ``every`` since this question was last asked, or since the
        start."""
        last, now = self._last.get(question, start_step // every), inner_step // every
        self._last[question] = max(last, now)  # repeating an undone step does not pass it again
        return now > last


def whole(what: str, value: object) -> int:
    """``value`` as a count. UserError: it is not a whole number of 0 or more, or reading it would wait for a device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise UserError(
            f"log({what}=...): a tensor on {value.device}, and reading it would hold up training until the device is "
            f"done; count on the CPU (targets.numel()), or give {what}.item()"
        )
    try:
        truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
        if truth or (isinstance(value, Tensor) and value.dim()):
            raise TypeError
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(
            f"log({what}={value!r:.60}); must be a whole number, an int or one of numpy or torch without dimensions; "
            "use int(...), or targets.numel()"
        ) from None
    if found < 0:
        raise UserError(f"log({what}={found}); must be 0 or more")
    return found


def one_number(loss: object) -> float | Tensor | None:
    """``loss`` if it is one number, as a float or as a tensor without dimensions (not read); else None."""
    if isinstance(loss, Tensor):
        return loss.detach().reshape(()) if loss.numel() == 1 and not loss.is_complex() else None
    try:
        return float(loss) if isinstance(loss, Real) and not isinstance(loss, bool) else None
    except OverflowError:  # an int or a fraction
        return None


def checked_loss(loss: object) -> float | Tensor | None:
    """The loss given to ``log``; None: none. UserError: it is not one number."""
    if loss is not None and one_number(loss) is None:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.60}"
        raise UserError(f"log(loss={shown}); must be one real number; use loss.mean()")
    return one_number(loss)


@dataclass(frozen=True, slots=True)
class Status:
    """Where a replica stands in its job (`ReplicaOptimizer.status`). Before the start all values are 0, empty or False.

    Attributes:
        started: whether it has joined the job.
        start_step: the job's inner step at which it joined.
        inner_step: the job's committed inner step plus this replica's pending steps.
        local_steps: inner steps that it has executed in this incarnation.
        committed_step: the job's committed inner step, of fragment 0.
        counted_step: the last inner step of this incarnation that is in the committed state; 0: none.
        pending_steps: inner steps that no committed state contains yet, by fragment.
        versions: committed outer steps, by fragment.
        replaying: whether inner steps of a dead replica are being repeated here (``policy.recover: replay``). If it is
            True at the start, the dead replica's random number generators are restored: do not seed them anew.
        stopped: why the job was stopped; "" if it was not.
    """

    started: bool = False
    start_step: int = 0
    inner_step: int = 0
    local_steps: int = 0
    committed_step: int = 0
    counted_step: int = 0
    pending_steps: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    replaying: bool = False
    stopped: str = ""
