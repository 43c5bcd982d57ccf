"""Keeps learning rate schedulers that count for themselves in step with the job.

A replica that joins a running job, or returns, begins at the job's inner step. A version may contain more steps than a
replica has taken, or fewer, if some are dropped. A scheduler of torch counts the calls of its `step`, and would not
follow. Only these calls show whether it counts inner steps or something else, such as epochs. A newcomer's schedulers
are moved before its first step, and back again if their calls show that they count something else; those of a resumed
replica, which may have counts of their own, are watched before they are moved.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from ftopt.optimizer.torch_schedulers import (
    Before,
    counted,
    go_back,
    may_have_schedulers,
    plausible,
    quiet,
    rewind,
    schedulers_of,
)
from ftopt.step.inner import Inner

_log = logging.getLogger(__name__)

_NO_STEPS = (ReduceLROnPlateau, SWALR)
"""Schedulers that count evaluations or epochs."""
_WATCHED = 2
"""Inner steps after which a scheduler is known to count them, if it was called once with each."""
_LONG = 16
"""Inner steps after which a scheduler's call frequency is known, even if a scaler has skipped steps."""
_placed: weakref.WeakSet[LRScheduler] = weakref.WeakSet()
"""Schedulers that the user has brought forward with `advance`, to a count of their own."""


@dataclass
class _Watched:
    """A scheduler, its count and the replica's inner steps when it was first seen, and its moves since.

    ``job``: the job's inner step when it was first seen, with the job's leaps since. ``lag``: its distance behind the
    job, negative if it is ahead. ``counts``: whether it counts inner steps; None: not known yet. ``early``: it was
    moved before this was known. ``anew``: it has begun at 0 in a resumed replica, whose rates are the checkpoint's.
    """

    find: weakref.ref[LRScheduler]
    first: int
    at: int
    job: int
    lag: int
    moved: int = 0
    counts: bool | None = None
    anew: bool = False
    early: bool = False

    def calls(self, scheduler: LRScheduler) -> int:
        """The user's calls of its `step` since it was first seen."""
        return counted(scheduler) - self.first - self.moved


class Schedules:
    """A replica's schedulers, those made on the wrapped optimizer or on an inner one.

    Each is watched from the first inner step on. Once it was called with each of two steps, or in a newcomer before, it
    is moved to the job's inner step, and follows it. The log names schedulers that are behind the job but count
    something else.

    Attributes:
        due: whether `follow` has work before the next step.
        wrapper: finds the wrapped optimizer, on which schedulers are made.
    """

    wrapper: Callable[[], Optimizer | None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.due = True
        self._off = False
        self._ahead = 0
        self._stays_ahead = False
        self._since: Before | None = None
        self._watched: list[_Watched] | None = None
        self._before: Before | None = None  # the first step, if schedulers were moved before it

    @property
    def known(self) -> bool:
        """Whether each scheduler is known to count inner steps, or not to. Else `follow` counts its calls, and is due
        right before a step alone: some loops call schedulers after all else."""
        return self._watched is not None and all(each.counts is not None for each in self._watched)

    def leave_alone(self) -> None:
        """Turns this off, for a trainer's callback that knows the trainer's counts."""
        self._off = True

    def follow(
        self, core: object, inner: Inner, replica: str, *, start_step: int, local_steps: int, inner_step: int
    ) -> None:
        """Moves schedulers before a step: the rates are for ``inner_step``. Trainers' own optimizers refer to
        ``core``."""
        self.due = False
        if self._off:
            return
        ahead = inner_step - start_step - local_steps
        if self._watched is None:
            self._ahead = ahead
            self._watched = list(self._see(core, inner, replica, local_steps, inner_step))
            if not local_steps:
                self._move_early(replica)
        leap, self._ahead = ahead - self._ahead, ahead
        for each in self._watched:
            each.job, each.lag = each.job + leap, each.lag + leap
            if each.counts is None:
                each.counts = self._judge(replica, each, local_steps - each.at)
                self.due |= each.counts is None
        if any(each.early and each.counts is False for each in self._watched):
            self._move_back()
        if not self.due:
            self._before = None
        forward = [each for each in self._watched if each.lag > 0 and (each.counts or each.early)]
        if any(each.anew for each in forward):
            self._begin_anew(replica, forward)
        if forward:
            _forward(replica, forward)
        if any(each.lag < 0 and each.counts for each in self._watched):
            self._go_back(replica)

    def _move_early(self, replica: str) -> None:
        """Moves a newcomer's schedulers before its first step, except those that user code has placed. None of them if
        one cannot go so far, or if a rate would not be between 0 and its schedule's peak: it counts something else."""
        found = [(each, x) for each in self._watched or () if (x := each.find()) is not None]
        early = [(each, x) for each, x in found if each.lag > 0 and each.first <= 1 and x not in _placed]
        if not early:
            return
        before, lags = Before([x for _, x in found]), [each.lag for each, _ in early]
        if _in_turns([each for each, _ in early]) or not all(plausible(x) for _, x in early):
            before.restore()
            for (each, _), lag in zip(early, lags, strict=True):
                each.lag = lag
            return
        self._before = before
        for (each, x), lag in zip(early, lags, strict=True):
            each.moved, each.early = lag, True
            _log_moved(replica, x, lag)

    def _move_back(self) -> None:
        """Sets all schedulers to where their calls alone have brought them: one that was moved early counts something
        else, and a rate may be the product of several schedules."""
        assert self._watched is not None and self._before is not None
        lags = [each.lag + each.moved for each in self._watched]
        for each in self._watched:
            each.lag = each.calls(x) if (x := each.find()) is not None else 0
        self._before.restore()
        _in_turns(self._watched)
        for each, lag in zip(self._watched, lags, strict=True):
            each.lag, each.moved, each.early = lag, 0, False

    def _go_back(self, replica: str) -> None:
        """Moves schedulers back to the job's inner step: steps were dropped, or gradients wait to be counted."""
        found = [(each, x) for each in self._watched or () if (x := each.find()) is not None]
        lags = [min(0, each.lag) if each.counts else 0 for each, _ in found]
        counts = [max(0, counted(x) + lag) for (_, x), lag in zip(found, lags, strict=True)]
        names = " and ".join(type(x).__name__ for (_, x), lag in zip(found, lags, strict=True) if lag)
        schedulers = [x for _, x in found]
        moved = not self._stays_ahead and go_back(schedulers, counts, self._since)
        self._since = Before(schedulers) if moved else None  # with `mix`, the next time is near
        for (each, _), lag in zip(found, lags, strict=True):
            each.lag -= lag if moved else 0  # else it stays ahead until the job has come there
            each.moved += lag if moved else 0
        if moved:
            _log.debug("replica %s: %s went back %d steps with the job", replica, names, -min(lags))
        elif not self._stays_ahead:
            self._stays_ahead = True
            _log.warning(
                "replica %s: %s stays %d steps ahead of the job, of whose steps some were dropped: its steps alone do "
                "not give its present rates, so that it cannot go back; set its rates as in the other replicas",
                replica, names, -min(lags),
            )  # fmt: skip

    def _see(self, core: object, inner: Inner, replica: str, local_steps: int, inner_step: int) -> Iterable[_Watched]:
        optimizers = [x for x in (self.wrapper(), *inner.optimizers) if x is not None]
        if inner_step <= local_steps and not may_have_schedulers(optimizers):
            return
        for scheduler in schedulers_of([core, *optimizers]):
            if not isinstance(scheduler, _NO_STEPS):
                count = counted(scheduler)
                lag, anew = max(0, inner_step - count), local_steps > 0 == count
                yield _Watched(weakref.ref(scheduler), count, local_steps, inner_step, lag, anew=anew)
            elif inner_step > local_steps and counted(scheduler) <= 0:
                _log.warning(
                    "replica %s: %s does not count inner steps and begins anew here, while the job is at inner step "
                    "%d; set it to where those of the other replicas are",
                    replica, type(scheduler).__name__, inner_step,
                )  # fmt: skip

    def _begin_anew(self, replica: str, forward: Sequence[_Watched]) -> None:
        """Resets schedulers that were not in the checkpoint to the initial rates before they go forward: most compute a
        rate from the present one, which was the checkpoint's."""
        fresh = [(each, x) for each in forward if each.anew and (x := each.find()) is not None]
        for each in forward:
            each.anew = False
        calls = [counted(x) for _, x in fresh]
        alone = len(fresh) == sum(each.find() is not None for each in self._watched or ())
        if alone and rewind([x for _, x in fresh]):
            for (each, _), count in zip(fresh, calls, strict=True):
                each.lag += count
            return
        _log.warning(
            "replica %s: %s began anew at the checkpoint's rates, which may differ from now on from those of a run "
            "without a break; include each scheduler in the checkpoint: checkpoints.include(scheduler=scheduler)",
            replica, " and ".join(type(x).__name__ for _, x in fresh),
        )  # fmt: skip

    def _judge(self, replica: str, each: _Watched, steps: int) -> bool | None:
        """Whether a scheduler counts inner steps, after ``steps`` inner steps; None: not known yet."""
        if (scheduler := each.find()) is None:
            return False
        calls, name = each.calls(scheduler), type(scheduler).__name__
        if steps < _WATCHED:
            return None
        if calls == steps:
            return True
        if calls > steps and steps < _LONG:
            return None
        if steps <= calls < 2 * steps:
            return True
        if each.job > each.at and scheduler not in _placed:  # else its count is this replica's own, as after a resume
            how = f"{calls} calls in {steps} inner steps"
            _log.warning(
                "replica %s: %s does not count inner steps (%s) and stays at its step %d, while the job is at inner "
                "step %d: bring it to where those of the other replicas are, before the first step, with "
                "ftopt.integrations.advance(scheduler, count)",
                replica, name, how, each.first + calls, each.job + steps,
            )  # fmt: skip
        return False


def advance(scheduler: LRScheduler, step: int) -> None:
    """Brings a scheduler, of any kind but `ReduceLROnPlateau`, forward to ``step``; never back.

        with optimizer:
            advance(scheduler, optimizer.start_step)

    A scheduler that the loop steps with each inner step does not need this in a replica that joins a running job. In
    one that is resumed, without its scheduler in the checkpoint, the first two steps are then also taken at the job's
    rate.

    Args:
        scheduler: one of torch's, or a subclass.
        step: its new count: the job's inner step, or its epoch.
    """
    _placed.add(scheduler)
    if not isinstance(scheduler, _NO_STEPS):
        if counted(scheduler) == 0 < step:  # after a resume the rates come from the checkpoint
            around = {id(x): x for x in (scheduler, *schedulers_of([scheduler.optimizer]))}
            if all(counted(x) == 0 for x in around.values()):
                rewind(list(around.values()))
        with quiet():
            while 0 <= counted(scheduler) < step:
                scheduler.step()


def _in_turns(watched: Sequence[_Watched]) -> dict[int, Exception]:
    """Steps schedulers by their lags, in turn, as a loop does, since some compute a rate from the present one. Returns
    the errors of those that raise one, by their number."""
    failed = dict[int, Exception]()
    with quiet():
        while left := [(i, each) for i, each in enumerate(watched) if each.lag > 0 and i not in failed]:
            for i, each in left:
                try:
                    if (scheduler := each.find()) is not None:
                        scheduler.step()
                    each.lag -= 1
                except Exception as error:
                    failed[i] = error
    return failed


def _forward(replica: str, watched: Sequence[_Watched]) -> None:
    """Moves schedulers by their lags."""
    lags = [each.lag for each in watched]
    failed = _in_turns(watched)
    for i, (each, lag) in enumerate(zip(watched, lags, strict=True)):
        if (scheduler := each.find()) is not None and i in failed:
            _log.warning(
                "replica %s: %s stays at its step %d, %d behind the job: its step() raised %s: %s",
                replica, type(scheduler).__name__, counted(scheduler), each.lag, type(failed[i]).__name__, failed[i],
            )  # fmt: skip
            lag, each.lag, each.counts, each.early = lag - each.lag, 0, False, False
        elif scheduler is not None and not each.moved:
            _log_moved(replica, scheduler, lag)
        each.moved += lag


def _log_moved(replica: str, scheduler: LRScheduler, lag: int) -> None:
    _log.info(
        "replica %s: %s was %d inner steps behind the job, and is at its step %d now",
        replica, type(scheduler).__name__, lag, counted(scheduler),
    )  # fmt: skip
