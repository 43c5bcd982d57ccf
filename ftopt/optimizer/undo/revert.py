"""Reverts the last step of torch's optimizers in place.

All checks are made before the first tensor is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.undo.analysis import ParameterStep, last_step
from ftopt.optimizer.undo.copies import CopiedStep
from ftopt.optimizer.undo.inverses import chunks, wide
from ftopt.optimizer.undo.record import RECORDERS, record_steps

_SQUARES = ("exp_avg_sq",)
"""Moments that are at least 0."""


@dataclass(frozen=True, slots=True)
class Undone:
    """What `ftopt.undo.undo_step` did.

    Args:
        whole: the step was complete; False: it had raised half-way, and is repaired.
        reverted: number of reverted parameters.
        untouched: number of unchanged parameters: they had no gradient, or the step did not reach them.
    """

    whole: bool
    reverted: int
    untouched: int


def revert(optimizers: Sequence[Optimizer], reached: Sequence[bool] | None = None) -> Undone:
    """Undoes the last step of several optimizers that step as one. UserError: it cannot be undone; nothing has changed.

    Args:
        reached: whether the step has reached each of them. Default: all.
    """
    reached = [True] * len(optimizers) if reached is None else reached
    stepped = [optimizer for optimizer, is_reached in zip(optimizers, reached, strict=True) if is_reached]
    recorders = [(optimizer, RECORDERS.get(optimizer)) for optimizer in stepped]
    copied = [(optimizer, recorder) for optimizer, recorder in recorders if isinstance(recorder, CopiedStep)]
    for optimizer, copies in copied:
        copies.check(optimizer)
    found = [last_step(optimizer, each) for optimizer, each in recorders if not isinstance(each, CopiedStep)]
    steps = [step for part, _ in found for step in part]
    changed = [step for step in steps if step.changed]
    for step in changed:
        _check(step)
    for optimizer in stepped:
        record_steps(optimizer).forget("the last one is undone already")
    for step in steps:
        _write(step)
    reverted = len(changed) + sum(copies.restore(optimizer) for optimizer, copies in copied)
    parameters = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
    whole = all(reached) and all(whole for _, whole in found) and all(copies.complete for _, copies in copied)
    return Undone(whole, reverted, parameters - reverted)


def _check(step: ParameterStep) -> None:
    unit = torch.finfo(step.parameter.dtype).eps / 2
    for part in chunks(_tensors(step)):
        now = wide(part)
        if not step.rule.fits(now, _before(step, now), unit):
            raise UserError(
                f"undo_step: the gradient of {step.name} is not the one that the step was taken with, or something is "
                "NaN or Inf, or weight decay took more than half of an element; keep the gradients (clipped as they "
                "were) until undo_step, or restore a checkpoint"
            )


@torch.no_grad()
def _write(step: ParameterStep) -> None:
    state = step.state
    if step.changed:
        for part in chunks(_tensors(step)):
            for name, value in _before(step, wide(part)).items():
                part[name].copy_(value.clamp_(min=0) if name in _SQUARES else value)
    if step.had is None:
        step.optimizer.state.pop(step.parameter, None)
        return
    if step.counted:
        state["step"] -= 1
    for name in step.rule.moments if step.first else ():
        if name in step.had:
            state[name].zero_()
        else:
            state.pop(name, None)


def _before(step: ParameterStep, now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return step.rule.before(now, step.done, t=step.t, first=step.first)


def _tensors(step: ParameterStep) -> dict[str, Tensor]:
    gradient = step.parameter.grad
    assert gradient is not None
    moments = {name: step.state[name] for name in step.rule.moments if step.state.get(name) is not None}
    return {"param": step.parameter.detach(), "grad": gradient, **moments}
