"""A record of an optimizer's last step, so that it can be undone: settings and version counters, no copy of the
tensors.

Before a step the recorder notes the groups' settings (a scheduler changes them right after it), and the number of
in-place changes of each parameter and each tensor of its state (``Tensor._version``). After it, it notes that the step
is complete, and the gradients that it used. A step that raises leaves an incomplete record; the version counters then
show which operations were applied to which tensor. For tensors without version counts, samples show it
(`ftopt.optimizer.undo.probe`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.undo.copies import CopiedStep
from ftopt.optimizer.undo.inverses import RULES, Rule, SgdRule
from ftopt.optimizer.undo.probe import Kind, Sample, samples_of


@dataclass(slots=True)
class ParameterRecord:
    """The record of one parameter.

    Args:
        version: the parameter's version before the step.
        state: the versions of the tensors of its state before the step; None: it had no state.
        version_after: its version after the step; None: the step is incomplete.
        gradient: the gradient that the step used, at ``gradient_version``; None if it had none.
    """

    parameter: Tensor
    version: int
    state: Mapping[str, int] | None
    version_after: int | None = None
    gradient: weakref.ref[Tensor] | None = None
    gradient_version: int = 0

    def complete(self) -> None:
        """Records the versions after the step."""
        self.version_after = self.parameter._version
        if (gradient := self.parameter.grad) is not None:
            self.gradient, self.gradient_version = weakref.ref(gradient), gradient._version

    @property
    def has_gradient(self) -> bool:
        """Whether the gradient that the step used still exists, unchanged."""
        gradient = self.parameter.grad
        if gradient is None or self.gradient is None:
            return False
        return self.gradient() is gradient and gradient._version == self.gradient_version


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One parameter group: its settings in the step, its parameters, and samples of those without version counts."""

    settings: Mapping[str, Any]
    parameters: Sequence[ParameterRecord]
    samples: Mapping[Kind, Sequence[Sample]]


class StepRecorder:
    """Records the steps of an optimizer whose steps have an inverse, by its hooks.

    Attributes:
        record: the record of the last step, by parameter group; None if there is no step to undo, for the reason
            ``why``.
        complete: whether that step returned without an error.
        found_inf: GradScaler's, for a fused optimizer: not 0 if the optimizer skipped the step.
        steps: number of steps begun since this was set to 0.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.record: list[GroupRecord] | None = None
        self.complete, self.steps = False, 0
        self.found_inf: Tensor | None = None
        self.why = "none has been taken since its steps are recorded"
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget("its state has been loaded since"))

    def forget(self, why: str) -> None:
        """Drops the record, since there is nothing to undo; notes ``why``."""
        self.record, self.why = None, why

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        self.record = [_group_record(optimizer, group) for group in optimizer.param_groups]
        self.complete = False
        self.found_inf = getattr(optimizer, "found_inf", None)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in self.record or ():
            for parameter in group.parameters:
                parameter.complete()
        self.complete = True


def why_not(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """Why steps with a group's settings are not inverted; None: they are."""
    if type(optimizer) not in RULES:
        return "steps of SGD, Adam and AdamW"
    rule = RULES[type(optimizer)].of(group)
    if (why := rule.why_not()) is not None:
        return why
    if group["differentiable"]:
        return "differentiable=True: others hold the tensors of the step; differentiable=False"
    for p in group["params"]:
        if p.is_complex() or (p.grad is not None and p.grad.is_sparse):
            return "complex parameters or sparse gradients; real and dense ones"
        if p.device.type == "cpu" and p.itemsize == 2 and group.get("fused") and isinstance(rule, SgdRule):
            return (
                "fused SGD leaves most of a bf16 or fp16 tensor as it is on a CPU (pytorch issue 191763); foreach=True"
            )
    return None


def rule_of(optimizer: Optimizer, number: int, settings: Mapping[str, Any]) -> Rule:
    """The inverse of a step of a group, with its ``settings`` in that step. UserError: there is none."""
    why = why_not(optimizer, {**settings, "params": optimizer.param_groups[number]["params"]})
    if why is not None:
        raise UserError(
            f"undo_step: a step of {type(optimizer).__name__} cannot be inverted in parameter group {number}: {why} "
            "can be undone; call ftopt.undo.undoable(optimizer) before training, which keeps copies"
        )
    return RULES[type(optimizer)].of(settings)


def record_steps(optimizer: Optimizer) -> StepRecorder | CopiedStep:
    """Records the optimizer's steps from now on, without copies if they have an inverse."""
    if (recorder := RECORDERS.get(optimizer)) is None:
        inverted = all(why_not(optimizer, group) is None for group in optimizer.param_groups)
        recorder = RECORDERS[optimizer] = StepRecorder(optimizer) if inverted else CopiedStep(optimizer)
    return recorder


RECORDERS: weakref.WeakKeyDictionary[Optimizer, StepRecorder | CopiedStep] = weakref.WeakKeyDictionary()
"""The recorders of all optimizers whose steps are recorded."""


def _group_record(optimizer: Optimizer, group: Mapping[str, Any]) -> GroupRecord:
    settings = dict(group)
    if isinstance(settings["lr"], Tensor):
        settings["lr"] = settings["lr"].clone()  # the only setting that can be a tensor; schedulers write to it
    states = optimizer.state
    parameters = [ParameterRecord(p, p._version, _versions(states.get(p))) for p in group["params"]]
    return GroupRecord(settings, parameters, samples_of(optimizer, group))


def _versions(state: Mapping[str, Any] | None) -> dict[str, int] | None:
    if state is None:
        return None
    return {name: value._version for name, value in state.items() if isinstance(value, Tensor)}
