"""Finds torch's schedulers, and moves them: forward by their steps, and back to an earlier count."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

_CHANGED = ("lr", "momentum", "betas")
"""The keys of a parameter group that schedulers change."""
_AROUND = 3
"""Maximum nesting of optimizers."""


def may_have_schedulers(optimizers: Sequence[Optimizer]) -> bool:
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


def _copied(value: Any) -> Any:
    """A copy of tensors and containers, with other objects, such as the optimizer and functions, themselves."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return copy(value) if isinstance(value, dict | set | deque) else value


class Before:
    """Schedulers, and the rates of their optimizers, as they are now.

    Attributes:
        counts: the schedulers' counts.
    """

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self.counts, family = [counted(x) for x in schedulers], list(schedulers)
        for x in family:
            family += vars(x).get("_schedulers", ())
        self._states = [(vars(x), _copied(vars(x))) for x in family]
        groups = [group for x in schedulers for group in x.optimizer.param_groups]
        self._rates = [(group, {k: deepcopy(group[k]) for k in _CHANGED if k in group}) for group in groups]

    def restore(self) -> None:
        """Sets all back."""
        for there, state in self._states:
            there.update(_copied(state))
        for group, rates in self._rates:
            for key, value in rates.items():
                set_rate(group, key, deepcopy(value))


def go_back(schedulers: Sequence[LRScheduler], counts: Sequence[int], since: Before | None = None) -> bool:
    """Sets schedulers, all those of their optimizers, back to earlier counts, with the rates that they had there.

    Most compute a rate from the present one: they begin again at ``since``, if that is early enough, else at 0. Returns
    False, and changes nothing, if their steps alone do not give the present rates: user code or another scheduler has
    changed these.
    """
    groups = [group for x in schedulers for group in x.optimizer.param_groups]
    rates, before = [float(group["lr"]) for group in groups], Before(schedulers)
    if since is not None and (len(since.counts) != len(counts) or any(map(int.__gt__, since.counts, counts))):
        since = None
    jump = all(map(_is_of_its_count, schedulers))
    for goal in (before.counts, counts):
        if jump:
            for x, count in zip(schedulers, goal, strict=True):
                x.last_epoch = count - 1
        elif since is not None:
            since.restore()
        elif not rewind(schedulers):
            break
        if not _forward(schedulers, goal):
            break
        if goal is counts:
            return True
        if any(abs(float(group["lr"]) - rate) > 1e-6 * abs(rate) for group, rate in zip(groups, rates, strict=True)):
            break
    before.restore()
    return False


def _is_of_its_count(scheduler: LRScheduler) -> bool:
    """Whether it computes its rates from its count alone; a subclass may have other state."""
    kind = type(scheduler)
    return isinstance(scheduler, LambdaLR) and (kind.get_lr, kind.step) == (LambdaLR.get_lr, LRScheduler.step)


def _forward(schedulers: Sequence[LRScheduler], counts: Sequence[int]) -> bool:
    """Steps schedulers in turn up to their counts; returns whether none raises an error."""
    try:
        with quiet():
            while left := [x for x, count in zip(schedulers, counts, strict=True) if counted(x) < count]:
                for x in left:
                    x.step()
    except Exception:
        return False
    return True


def rewind(schedulers: Sequence[LRScheduler]) -> bool:
    """Resets schedulers and the rates of their optimizers to count 0; returns whether this is possible."""
    groups = [group for x in schedulers for group in x.optimizer.param_groups]
    if not all("initial_lr" in group for group in groups):
        return False
    for group in groups:
        set_rate(group, "lr", group["initial_lr"])
    try:
        with quiet():
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


def set_rate(group: dict[str, Any], key: str, value: Any) -> None:
    """Sets a rate; one that is a tensor in place, since a compiled or captured step reads it there."""
    if isinstance(group[key], Tensor):
        group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = value


def plausible(scheduler: LRScheduler) -> bool:
    """Whether the rates are between 0 and the schedule's peak."""
    own = vars(scheduler).get("max_lrs", ())
    groups = scheduler.optimizer.param_groups
    peaks = [max(map(float, (group["initial_lr"], group.get("max_lr", 0.0), *own))) for group in groups]
    return all(0 <= float(group["lr"]) <= 1.001 * peak for group, peak in zip(groups, peaks, strict=True))


def quiet() -> warnings.catch_warnings[None]:
    """Silences torch's warning about a scheduler's step before the optimizer's first one."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
