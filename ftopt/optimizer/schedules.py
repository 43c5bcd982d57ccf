"""Keeps learning rate schedulers that count for themselves in step with the job.

A replica that joins a running job, or returns, begins at the job's inner step, and a version may contain more steps
than a replica has taken. A scheduler of torch counts the calls of its `step`, and would fall behind. Only these calls
show whether it counts inner steps or something else, such as epochs. A newcomer's schedulers are moved before its first
step, and back again if their calls show that they count something else; those of a resumed replica, which may have
counts of their own, are watched before they are moved.
"""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import SWALR

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
_CHANGED, _PLAIN = ("lr", "momentum", "betas"), (int, float, list)
"""What schedulers change: keys of a parameter group, and attributes of their own of these types."""
_AROUND = 3
"""Maximum nesting of optimizers."""


@dataclass
class _Watched:
    """A scheduler, its count and the replica's inner steps when it was first seen, and its moves since.

    ``job``: the job's inner step when it was first seen, with the job's leaps since. ``lag``: its distance behind the
    job. ``counts``: whether it counts inner steps; None: not known yet. ``early``: it was moved before this was known.
    ``anew``: it has begun at 0 in a resumed replica, whose rates are the checkpoint's.
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


class _Before:
    """Schedulers, and the rates of their optimizers, as they are now."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        family = list(schedulers)
        for x in family:
            family += vars(x).get("_schedulers", ())
        self._states = [(vars(x), {k: copy(v) for k, v in vars(x).items() if isinstance(v, _PLAIN)}) for x in family]
        groups = [group for x in schedulers for group in x.optimizer.param_groups]
        self._rates = [(group, {k: deepcopy(group[k]) for k in _CHANGED if k in group}) for group in groups]

    def restore(self) -> None:
        """Sets all back; once."""
        for there, state in self._states:
            there.update(state)
        for group, rates in self._rates:
            for key, value in rates.items():
                _set(group, key, value)


class Schedules:
    """A replica's schedulers, those made on the wrapped optimizer or on an inner one.

    Each is watched from the first inner step on. Once it was called with each of two steps, or in a newcomer before, it
    is moved to the job's inner step, and follows its leaps. The log names schedulers that are behind the job but count
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
        self._watched: list[_Watched] | None = None
        self._before: _Before | None = None  # the first step, if schedulers were moved before it

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
        leap, self._ahead = max(0, ahead - self._ahead), max(ahead, self._ahead)
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

    def _move_early(self, replica: str) -> None:
        """Moves a newcomer's schedulers before its first step, except those that user code has placed. None of them if
        one cannot go so far, or if a rate would not be between 0 and its schedule's peak: it counts something else."""
        found = [(each, x) for each in self._watched or () if (x := each.find()) is not None]
        early = [(each, x) for each, x in found if each.lag > 0 and each.first <= 1 and x not in _placed]
        if not early:
            return
        before, lags = _Before([x for _, x in found]), [each.lag for each, _ in early]
        if _in_turns([each for each, _ in early]) or not all(_plausible(x) for _, x in early):
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

    def _see(self, core: object, inner: Inner, replica: str, local_steps: int, inner_step: int) -> Iterable[_Watched]:
        optimizers = [x for x in (self.wrapper(), *inner.optimizers) if x is not None]
        if inner_step <= local_steps and not _may_have_schedulers(optimizers):
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
        if alone and _rewind([x for _, x in fresh]):
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


def _may_have_schedulers(optimizers: Sequence[Optimizer]) -> bool:
    """Whether the search below, which scans all objects of the process, may find a scheduler that changes a rate now.

    Most schedulers replace the `step` of their optimizer. If a trainer has wrapped these optimizers, they do so on the
    trainer's optimizer, whose class is neither torch's nor ftopt's.
    """
    if any("step" in vars(x) for x in optimizers):
        return True
    kinds, ours = [Optimizer], {type(x) for x in optimizers}
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(x.__module__.partition(".")[0] not in ("torch", "ftopt") for x in kinds if x not in ours)


def schedulers_of(optimizers: list[Any]) -> list[LRScheduler]:
    """Torch's schedulers on optimizers, or on a core, except those that another scheduler steps.

    Torch has no list of them; they refer to their optimizer. (`gc.get_objects` would disturb other threads that make
    tuples.)
    """
    found: dict[int, LRScheduler] = {}
    seen = set[int]()
    for _ in range(_AROUND):  # trainers wrap it in optimizers of their own
        seen.update(map(id, optimizers))
        owners = _owners(optimizers)
        found |= {id(x): x for x in owners if isinstance(x, LRScheduler)}
        optimizers = [x for x in owners if isinstance(x, Optimizer) and id(x) not in seen]
        if not optimizers:
            break
    own = [s for s in found.values() if counted(s) >= 0]
    led = {id(child) for s in own for child in vars(s).get("_schedulers", ())}
    return [s for s in own if id(s) not in led]


def _owners(objects: Sequence[Any]) -> list[Any]:
    """Schedulers and optimizers that have one of these objects as an attribute."""
    referrers = gc.get_referrers(*objects)
    dicts = [x for x in referrers if type(x) is dict]
    kinds = (LRScheduler, Optimizer)
    direct = [x for x in referrers if issubclass(type(x), kinds)]
    held = gc.get_referrers(*dicts) if dicts else []
    known = {id(x) for x in dicts}
    return [*direct, *(x for x in held if issubclass(type(x), kinds) and id(vars(x)) in known)]


def counted(scheduler: LRScheduler) -> int:
    """A scheduler's count; -1 if it is not known."""
    found: Any = vars(scheduler)
    while "last_epoch" not in found and found.get("_schedulers"):  # ChainedScheduler
        found = vars(found["_schedulers"][0])
    count = found.get("last_epoch", -1)
    return int(count) if isinstance(count, int) else -1


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
                _rewind(list(around.values()))
        with _quiet():
            while 0 <= counted(scheduler) < step:
                scheduler.step()


def _rewind(schedulers: Sequence[LRScheduler]) -> bool:
    """Resets schedulers and the rates of their optimizers to count 0; returns whether this is possible."""
    groups = [group for x in schedulers for group in x.optimizer.param_groups]
    if not all("initial_lr" in group for group in groups):
        return False
    for group in groups:
        _set(group, "lr", group["initial_lr"])
    try:
        with _quiet():
            for x in schedulers:
                _to_zero(x)
    except Exception:
        return False
    return True


def _to_zero(scheduler: LRScheduler) -> None:
    """Resets a scheduler to its state after `__init__`."""
    children = vars(scheduler).get("_schedulers", ())
    if isinstance(scheduler, SequentialLR):
        for child in children:
            child.last_epoch = -1
        _to_zero(children[0])
        scheduler.last_epoch = 0
    elif children:
        for child in children:
            _to_zero(child)
    else:
        scheduler.last_epoch = -1
        scheduler._initial_step()


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Sets a rate; one that is a tensor in place, since a compiled or captured step reads it there."""
    if isinstance(group[key], Tensor):
        group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = value


def _plausible(scheduler: LRScheduler) -> bool:
    """Whether the rates are between 0 and the schedule's peak."""
    own = vars(scheduler).get("max_lrs", ())
    groups = scheduler.optimizer.param_groups
    peaks = [max(map(float, (group["initial_lr"], group.get("max_lr", 0.0), *own))) for group in groups]
    return all(0 <= float(group["lr"]) <= 1.001 * peak for group, peak in zip(groups, peaks, strict=True))


def _in_turns(watched: Sequence[_Watched]) -> dict[int, Exception]:
    """Steps schedulers by their lags, in turn, as a loop does, since some compute a rate from the present one. Returns
    the errors of those that raise one, by their number."""
    failed = dict[int, Exception]()
    with _quiet():
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


def _quiet() -> warnings.catch_warnings[None]:
    """Silences torch's warning about a scheduler's step before the optimizer's first one."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
