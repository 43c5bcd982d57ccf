"""What an optimizer's last step did to each of its tensors: by the record of the step, or by the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.tensors.gradients import local
from ftopt.optimizer.undo.inverses import AdamRule, Done, Rule, SgdRule
from ftopt.optimizer.undo.probe import broken_inside, took_place
from ftopt.optimizer.undo.record import ParameterMark, Sample, StepRecord, check_invertible, kind_of, log_of

_CHUNK = 1 << 16
"""Elements that are computed at once: all that is needed beside the tensors themselves."""


@dataclass(frozen=True, slots=True)
class ParameterStep:
    """One parameter's part of the step.

    Args:
        optimizer: whose.
        name: for messages.
        parameter: with its gradient.
        rule: its group's settings in the step.
        done: what the step did to it and its moments.
        counted: by how much its step count went up.
        first: its moments began with this step.
        had: the moments that were there before, as zeros if ``first``; None: its state began with this step.
    """

    optimizer: Optimizer
    name: str
    parameter: Tensor
    rule: Rule
    done: Done
    counted: int
    first: bool
    had: Mapping[str, int] | None

    @property
    def state(self) -> dict[str, Any]:
        """The parameter's."""
        found: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return found

    @property
    def t(self) -> float:
        """Its step count."""
        return _count(self.optimizer, self.parameter)

    @property
    def touched(self) -> bool:
        """Whether there is anything to revert."""
        return bool(self.counted or any(self.done.values()))


def tasks_of(optimizer: Optimizer) -> tuple[list[ParameterStep], bool]:
    """What it did to each parameter that has a gradient, and whether it went through."""
    check_invertible(optimizer, "undo_step")
    log = log_of(optimizer)
    if log is None:
        return _by_counters(optimizer)
    if log.record is None:
        raise UserError(f"undo_step: there is no step to undo: {log.why}; it goes one step back, right after it")
    rules = [_rule(optimizer, number, group) for number, group in enumerate(log.record.groups)]
    if log.record.found_inf is not None and bool(log.record.found_inf.any()):
        if any("momentum_buffer" in rule.moments for rule in rules):  # pytorch up to 2.13 goes on with those
            raise UserError(
                "undo_step: GradScaler skipped the step, but fused SGD has put its Inf or NaN into momentum_buffer all "
                "the same; use foreach=True, and clear the optimizer's state"
            )
        return [], True
    if log.record.versions_after is None:
        return _broken_off(optimizer, log.record, rules), False
    return _through(optimizer, log.record, rules), True


def _through(optimizer: Optimizer, record: StepRecord, rules: Sequence[Rule]) -> list[ParameterStep]:
    """The record's step was taken as a whole; its gradients must still be there."""
    tasks, gone = [], []
    for number, marks in enumerate(record.marks()):
        for place, mark in enumerate(marks):
            p, name = mark.parameter, _name(optimizer, number, place)
            if p._version != mark.version_after:
                raise UserError(
                    f"undo_step: {name} has been changed since the step (an outer step was taken up, say); "
                    "call it before anything else changes the parameters"
                )
            if not mark.stepped:
                continue
            if mark.gradient is None:
                gone.append(name)
                continue
            t = _count(optimizer, p)
            first = t == 1 or (t == 0 and not _has_moments(mark.state, rules[number]))
            tasks.append(
                ParameterStep(optimizer, name, p, rules[number], rules[number].whole, int(t > 0), first, mark.state)
            )
    if gone:
        raise _no_gradient(gone)
    return tasks


def _broken_off(optimizer: Optimizer, record: StepRecord, rules: Sequence[Rule]) -> list[ParameterStep]:
    """The record's step raised: which operations came to which tensor."""
    tasks = []
    for number, (marks, rule) in enumerate(zip(record.marks(), rules, strict=True)):
        counted = {mark.parameter: _times_counted(optimizer, mark) for mark in marks}
        came = {
            kind: _came_to(optimizer, samples, [p for p in counted if kind_of(p) == kind], counted, rule)
            for kind, samples in record.samples.get(number, {}).items()
        }
        for place, mark in enumerate(marks):
            p, name = mark.parameter, _name(optimizer, number, place)
            if p.grad is None:
                if p._version != mark.version or counted[p]:
                    raise _no_gradient([name])
                continue
            if came:
                done = rule.whole if came[kind_of(p)] else dict.fromkeys(rule.whole, 0)
            else:
                done = {"param": p._version - mark.version} | {m: _changes(optimizer, mark, m) for m in rule.moments}
            odd = any(not 0 <= times <= rule.whole[what] for what, times in done.items())
            ahead = "exp_avg" in rule.moments and not counted[p] and any(done.values())  # Adam counts first
            if odd or ahead or counted[p] > 1:
                raise UserError(f"undo_step: {name} has been changed by more than the step; restore a checkpoint")
            t = _count(optimizer, p)
            first = t == counted[p] if t else not _has_moments(mark.state, rule)
            tasks.append(ParameterStep(optimizer, name, p, rule, done, counted[p], first, mark.state))
    return tasks


def _came_to(
    optimizer: Optimizer, samples: Sequence[Sample], alike: Sequence[Tensor], counted: Mapping[Tensor, int], rule: Rule
) -> bool:
    """Whether the step came to tensors that change all together."""
    with_gradient = [p for p in alike if p.grad is not None]
    counts = {counted[p] for p in with_gradient}
    if not with_gradient or ("exp_avg" in rule.moments and counts == {0}):
        return False
    if len(counts) > 1:
        raise broken_inside()
    return took_place(samples, with_gradient, optimizer.state, rule)


def _times_counted(optimizer: Optimizer, mark: ParameterMark) -> int:
    """By how much a step count went up; 0 for SGD."""
    now = optimizer.state.get(mark.parameter, {}).get("step")
    if now is None:
        return 0
    return int(now) if mark.state is None else int(now._version) - mark.state["step"]


def _changes(optimizer: Optimizer, mark: ParameterMark, moment: str) -> int:
    """How often a moment was changed in place; of one that the step made, since then."""
    now = optimizer.state.get(mark.parameter, {}).get(moment)
    if now is None or (moment == "momentum_buffer" and (mark.state is None or moment not in mark.state)):
        return 0  # What SGD makes in a first step it makes as a whole.
    before = 0 if mark.state is None else mark.state.get(moment, 0)
    return int(now._version) - before


def _by_counters(optimizer: Optimizer) -> tuple[list[ParameterStep], bool]:
    """Nothing was recorded: gradients and settings at hand are taken for the step's, the state says who stepped."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise UserError(
            "undo_step: a scheduler changes this optimizer's learning rate, and the step's is not recorded; call "
            "ftopt.undoable(optimizer) before training"
        )
    rules = [_rule(optimizer, number, group) for number, group in enumerate(optimizer.param_groups)]
    placed = [
        (number, place, p)
        for number, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
    ]
    with_gradient = [(number, place, p) for number, place, p in placed if p.grad is not None]
    if not with_gradient:
        raise _no_gradient([_name(optimizer, *where) for *where, _ in placed])
    stepped = _stepped(optimizer, [(number, p) for number, _, p in with_gradient], rules)
    latest = max(_count(optimizer, p) for _, _, p in with_gradient)
    if gone := [_name(optimizer, n, i) for n, i, p in placed if p.grad is None and 0 < latest <= _count(optimizer, p)]:
        raise _no_gradient(gone)
    tasks = []
    for (number, place, p), did in zip(with_gradient, stepped, strict=True):
        rule, name, t = rules[number], _name(optimizer, number, place), _count(optimizer, p)
        state = optimizer.state.get(p, {})
        first = did and _looks_first(name, p, state, rule) if isinstance(rule, SgdRule) else t == 1
        done = rule.whole if did else dict.fromkeys(rule.whole, 0)
        had = None if first or not state else dict.fromkeys(state, 0)
        tasks.append(ParameterStep(optimizer, name, p, rule, done, int(did and t > 0), first, had))
    return tasks, all(stepped)


def _stepped(optimizer: Optimizer, parameters: Sequence[tuple[int, Tensor]], rules: Sequence[Rule]) -> list[bool]:
    """Which parameters were stepped: all, or the first ones in the order in which `step` goes through them."""
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


# What is asked of optimizers and of states.


def _rule(optimizer: Optimizer, number: int, group: Mapping[str, Any]) -> Rule:
    rule: Rule = SgdRule.of(group) if isinstance(optimizer, SGD) else AdamRule.of(group)
    why = rule.why_not()
    if why is None and group["differentiable"]:
        why = "differentiable=True: others hold the tensors of the step; differentiable=False"
    for parameter in optimizer.param_groups[number]["params"]:
        if parameter.is_complex() or (parameter.grad is not None and parameter.grad.is_sparse):
            why = "complex parameters or sparse gradients; real and dense ones"
        if group["fused"] and isinstance(rule, SgdRule) and parameter.device.type == "cpu" and parameter.itemsize == 2:
            why = (
                "fused SGD leaves most of a bf16 or fp16 tensor as it is on a CPU (pytorch issue 191763); foreach=True"
            )
    if why is not None:
        raise UserError(
            f"undo_step: a step of {type(optimizer).__name__} cannot be inverted in parameter group {number}: {why} "
            "can be undone; keep a copy of parameters and optimizer state instead"
        )
    return rule


def _count(optimizer: Optimizer, parameter: Tensor) -> float:
    """Adam's step count; 0 for SGD."""
    return float(optimizer.state.get(parameter, {}).get("step", 0))


def _has_moments(state: Mapping[str, int] | None, rule: Rule) -> bool:
    return state is not None and all(name in state for name in rule.moments)


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
        f"undo_step: cannot tell what the step did: {got}; call ftopt.undoable(optimizer) before training, so that "
        "its steps are recorded"
    )


# Its tensors, to compute with.


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Views of the same elements of each tensor (of their local shards)."""
    own = {name: local(tensor) for name, tensor in tensors.items()}
    if all(tensor.is_contiguous() for tensor in own.values()):
        parts = [torch.split(tensor.view(-1), _CHUNK) for tensor in own.values()]
        yield from (dict(zip(own, part, strict=True)) for part in zip(*parts, strict=True))
    else:
        yield own


def wide(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In double precision, where the device has it: the inverse adds no rounding of its own."""
    return {name: t.to(torch.float32 if t.device.type == "mps" else torch.float64) for name, t in tensors.items()}
