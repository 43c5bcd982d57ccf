"""Reverts the last step of torch's optimizers in place.

All that can refuse does so before the first tensor is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.undo.analysis import ParameterStep, chunks, tasks_of, wide
from ftopt.optimizer.undo.record import record_steps


@dataclass(frozen=True, slots=True)
class Undone:
    """What `ftopt.undo_step` did.

    Args:
        whole: the step had been taken as a whole; False: it had been broken off, and is repaired.
        reverted: so many parameters were brought back.
        untouched: so many had not been changed: without a gradient, or not reached.
    """

    whole: bool
    reverted: int
    untouched: int


def revert(optimizers: Sequence[Optimizer], reached: Sequence[bool] | None = None) -> Undone:
    """Undoes the last step of several optimizers that step as one.

    Args:
        optimizers: torch's own.
        reached: whether the step has come to each of them. Default: to all.

    Raises:
        UserError: it cannot be undone; nothing has changed.
    """
    reached = [True] * len(optimizers) if reached is None else reached
    there = [optimizer for optimizer, is_there in zip(optimizers, reached, strict=True) if is_there]
    tasks, whole = [], all(reached)
    for optimizer in there:
        found, through = tasks_of(optimizer)
        tasks += found
        whole = whole and through
    todo = [task for task in tasks if task.touched]
    for task in todo:
        _check(task)
    for optimizer in there:
        record_steps(optimizer).forget("the last one is undone already")
    for task in tasks:
        _write(task)
    parameters = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
    return Undone(whole, len(todo), parameters - len(todo))


def _check(task: ParameterStep) -> None:
    unit = torch.finfo(task.parameter.dtype).eps / 2
    for part in chunks(_tensors(task)):
        now = wide(part)
        if not task.rule.fits(now, _before(task, now), unit):
            raise UserError(
                f"undo_step: the gradient of {task.name} is not the one that the step was taken with, or something is "
                "NaN or Inf; keep the gradients (clipped as they were) until undo_step, or restore a checkpoint"
            )


@torch.no_grad()
def _write(task: ParameterStep) -> None:
    state = task.state
    if task.touched:
        for part in chunks(_tensors(task)):
            for name, value in _before(task, wide(part)).items():
                part[name].copy_(value.clamp_(min=0) if name == "exp_avg_sq" else value)
    if task.had is None:
        task.optimizer.state.pop(task.parameter, None)
        return
    if task.counted:
        state["step"] -= task.counted
    for name in task.rule.moments if task.first else ():
        if name in task.had:
            state[name].zero_()
        else:
            state.pop(name, None)


def _before(task: ParameterStep, now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return task.rule.before(now, task.done, t=task.t, first=task.first)


def _tensors(task: ParameterStep) -> dict[str, Tensor]:
    gradient = task.parameter.grad
    assert gradient is not None
    moments = {name: task.state[name] for name in task.rule.moments if task.state.get(name) is not None}
    return {"param": task.parameter.detach(), "grad": gradient, **moments}
