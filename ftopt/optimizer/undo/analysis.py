"""The effect of an optimizer's last step on each parameter, from the record of the step or the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.undo.inverses import Operations, Rule, SgdRule, chunks, wide
from ftopt.optimizer.undo.probe import kind_of, took_place
from ftopt.optimizer.undo.record import GroupRecord, ParameterRecord, StepRecorder, rule_of


@dataclass(frozen=True, slots=True)
class ParameterStep:
    """One parameter's part of the step.

    Args:
        name: the parameter's name, for messages.
        rule: its group's settings in the step.
        done: the operations of the step that were applied to it and to its moments.
        counted: the increase of its step count.
        first: whether its moments began with this step.
        had: the names in its state before; None: it had no state.
    """

    optimizer: Optimizer
    name: str
    parameter: Tensor
    rule: Rule
    done: Operations
    counted: int
    first: bool
    had: Mapping[str, int] | None

    @property
    def state(self) -> dict[str, Any]:
        """The parameter's state."""
        found: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return found

    @property
    def t(self) -> float:
        """Its step count."""
        return _count(self.optimizer, self.parameter)

    @property
    def changed(self) -> bool:
        """Whether the step changed anything."""
        return bool(self.counted or any(self.done.values()))


def last_step(optimizer: Optimizer, recorder: StepRecorder | None) -> tuple[list[ParameterStep], bool]:
    """The effect of the optimizer's last step on each parameter with a gradient, and whether the step is complete."""
    if recorder is None:
        return _by_state(optimizer)
    if recorder.record is None:
        raise UserError(
            f"undo_step: there is no step to undo: {recorder.why}; it goes one step back, right after that step"
        )
    groups = [(i, group, rule_of(optimizer, i, group.settings)) for i, group in enumerate(recorder.record)]
    if recorder.found_inf is not None and bool(recorder.found_inf.any()):
        if any("momentum_buffer" in rule.moments for _, _, rule in groups):  # pytorch up to 2.13 still updates these
            raise UserError(
                "undo_step: GradScaler skipped the step, but fused SGD has put its Inf or NaN into momentum_buffer all "
                "the same; use foreach=True, and clear the optimizer's state"
            )
        return [], True
    if recorder.complete:
        return _complete(optimizer, groups), True
    return [step for group in groups for step in _incomplete(optimizer, *group)], False


def _complete(optimizer: Optimizer, groups: Sequence[tuple[int, GroupRecord, Rule]]) -> list[ParameterStep]:
    """Analyses a complete step by its record; its gradients must still be present."""
    steps, gone = [], []
    for number, group, rule in groups:
        for place, noted in enumerate(group.parameters):
            p, name = noted.parameter, _name(optimizer, number, place)
            if p._version != noted.version_after:
                raise UserError(
                    f"undo_step: {name} has been changed since the step (an outer step was applied, say); "
                    "call it before anything else changes the parameters"
                )
            if noted.gradient is None:
                continue
            if not noted.has_gradient:
                gone.append(name)
            t = _count(optimizer, p)
            first = t == 1 or (t == 0 and not _has_moments(noted, rule))
            steps.append(ParameterStep(optimizer, name, p, rule, rule.whole, int(t > 0), first, noted.state))
    if gone:
        raise _no_gradient(gone)
    return steps


def _incomplete(optimizer: Optimizer, number: int, group: GroupRecord, rule: Rule) -> list[ParameterStep]:
    """Analyses a step that raised by its record: which operations were applied to which tensor."""
    steps = []
    counted = {noted.parameter: _times_counted(optimizer, noted) for noted in group.parameters}
    reached = {
        kind: took_place(samples, {p: n for p, n in counted.items() if kind_of(p) == kind}, optimizer.state, rule)
        for kind, samples in group.samples.items()
    }
    for place, noted in enumerate(group.parameters):
        p, name = noted.parameter, _name(optimizer, number, place)
        if p.grad is None:
            if p._version != noted.version or counted[p]:
                raise _no_gradient([name])
            continue
        if reached:
            done = rule.whole if reached[kind_of(p)] else dict.fromkeys(rule.whole, 0)
        else:
            done = {"param": p._version - noted.version} | {m: _changes(optimizer, noted, m) for m in rule.moments}
        odd = any(not 0 <= times <= rule.whole[what] for what, times in done.items())
        ahead = "exp_avg" in rule.moments and not counted[p] and any(done.values())  # Adam counts first
        if odd or ahead or counted[p] > 1:
            raise UserError(f"undo_step: {name} has been changed by more than the step; restore a checkpoint")
        t = _count(optimizer, p)
        first = t == counted[p] if t else not _has_moments(noted, rule)
        steps.append(ParameterStep(optimizer, name, p, rule, done, counted[p], first, noted.state))
    return steps


def _times_counted(optimizer: Optimizer, noted: ParameterRecord) -> int:
    """The increase of a step count; 0 for SGD."""
    now = optimizer.state.get(noted.parameter, {}).get("step")
    if now is None:
        return 0
    return int(now) if noted.state is None else int(now._version) - noted.state["step"]


def _changes(optimizer: Optimizer, noted: ParameterRecord, moment: str) -> int:
    """The number of in-place changes of a moment; if the step made it, since then."""
    now = optimizer.state.get(noted.parameter, {}).get(moment)
    before = (noted.state or {}).get(moment)
    if now is None or (moment == "momentum_buffer" and before is None):
        return 0  # In a first step SGD makes the buffer in one operation.
    return int(now._version) - (before or 0)


def _has_moments(noted: ParameterRecord, rule: Rule) -> bool:
    return noted.state is not None and all(name in noted.state for name in rule.moments)


def _by_state(optimizer: Optimizer) -> tuple[list[ParameterStep], bool]:
    """Analyses a step without a record: assumes that the gradients and settings are the step's, and infers from the
    state which parameters were stepped."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise UserError(
            "undo_step: a scheduler changes this optimizer's learning rate, and the step's is not recorded; call "
            "ftopt.undo.undoable(optimizer) before training"
        )
    rules = [rule_of(optimizer, number, group) for number, group in enumerate(optimizer.param_groups)]
    placed = [
        (number, _name(optimizer, number, place), p)
        for number, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    ]
    with_gradient = [(number, name, p) for number, name, p in placed if p.grad is not None]
    if not with_gradient:
        raise _no_gradient([name for _, name, _ in placed])
    stepped = _stepped(optimizer, [(number, p) for number, _, p in with_gradient], rules)
    latest = max(_count(optimizer, p) for _, _, p in with_gradient)
    if gone := [name for _, name, p in placed if p.grad is None and 0 < latest <= _count(optimizer, p)]:
        raise _no_gradient(gone)
    steps = []
    for (number, name, p), did in zip(with_gradient, stepped, strict=True):
        rule, t, state = rules[number], _count(optimizer, p), optimizer.state.get(p, {})
        first = did and _looks_first(name, p, state, rule) if isinstance(rule, SgdRule) else t == 1
        done = rule.whole if did else dict.fromkeys(rule.whole, 0)
        had = None if first or not state else dict.fromkeys(state, 0)
        steps.append(ParameterStep(optimizer, name, p, rule, done, int(did and t > 0), first, had))
    return steps, all(stepped)


def _stepped(optimizer: Optimizer, parameters: Sequence[tuple[int, Tensor]], rules: Sequence[Rule]) -> list[bool]:
    """Whether each parameter was stepped: all, or the first ones in the order of `step`."""
    if isinstance(optimizer, SGD):
        has = [(number, optimizer.state.get(p, {}).get("momentum_buffer") is not None) for number, p in parameters]
        if any(rules[number].moments and {(number, True), (number, False)} <= set(has) for number, _ in has):
            raise _cannot_tell("some parameters of a group have a momentum_buffer and some have none")
        return [has_buffer or not rules[number].moments for number, has_buffer in has]
    counts = [_count(optimizer, p) for _, p in parameters]
    stepped = [count == counts[0] for count in counts]
    if counts[0] == 0:
        raise UserError("undo_step: there is no step to undo: the optimizer has taken none")
    behind = [count for count, did in zip(counts, stepped, strict=True) if not did]
    if stepped != sorted(stepped, reverse=True) or any(count != counts[0] - 1 for count in behind):
        raise _cannot_tell(f"step counts of {min(counts):g} to {max(counts):g}")
    return stepped


def _looks_first(name: str, parameter: Tensor, state: Mapping[str, Any], rule: SgdRule) -> bool:
    if not rule.moments or parameter.grad is None:
        return False
    tensors = {"param": parameter.detach(), "grad": parameter.grad, "momentum_buffer": state["momentum_buffer"]}
    unit = torch.finfo(parameter.dtype).eps / 2
    first = all(rule.looks_first(wide(part), unit) for part in chunks(tensors))
    if first and rule.dampening and rule.dampening == rule.momentum:
        raise _cannot_tell(f"{name}'s momentum_buffer equals the gradient, as after a first step, or after two alike")
    return first


def _count(optimizer: Optimizer, parameter: Tensor) -> float:
    """Adam's step count; 0 for SGD."""
    return float(optimizer.state.get(parameter, {}).get("step", 0))


def _name(optimizer: Optimizer, group: int, place: int) -> str:
    shape = tuple(optimizer.param_groups[group]["params"][place].shape)
    return f"parameter {place} {shape} of group {group}"


def _no_gradient(names: Sequence[str]) -> UserError:
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return UserError(
        f"undo_step: the gradient that the step was taken with is gone or has been changed: {some}; call it "
        "before zero_grad() and before the next backward(), with the gradients clipped as they were"
    )


def _cannot_tell(got: str) -> UserError:
    return UserError(
        f"undo_step: cannot tell what the step did: {got}; call ftopt.undo.undoable(optimizer) before training, so "
        "that its steps are recorded"
    )
