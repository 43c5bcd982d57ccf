"""A record of an optimizer's last step, so that it can be undone: settings and counters, no copy of the tensors.

Before a step the log notes the groups' settings (a scheduler changes them right behind it), which moments there are,
and how often each tensor has been changed in place (``Tensor._version``). After it: that it is through, and which
gradients it used. A step that raises leaves a record that is not through; the version counters then tell which
operations were applied to which tensor.

Fused optimizers, and foreach ones on sharded parameters (DTensor), do not count versions (torch 2.13). Of these a few
elements of a few tensors of each group are kept: they change all together or not at all.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ftopt.optimizer.gradients import local

INVERTIBLE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)
_TENSORS, _ELEMENTS = 4, 16
"""So many tensors of a group, device and dtype are sampled (the first and the last among them), and so many elements
of each."""

Kind = tuple[torch.device, torch.dtype]
"""Tensors of one kind in a group are changed by one operation."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A parameter before a step: its version, and those of its moments (None: it had no state)."""

    parameter: Tensor
    version: int
    state: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The first elements of a parameter and of its first moment (None: there was none) before a step."""

    parameter: Tensor
    values: Tensor
    moment: Tensor | None


@dataclass(frozen=True, slots=True)
class After:
    """A parameter after a step: its version, and the gradient with which it was taken (None: it had none)."""

    version: int
    gradient: weakref.ref[Tensor] | None
    gradient_version: int


@dataclass(slots=True)
class Record:
    """One step.

    Args:
        groups: each group's settings.
        marks: of each group's parameters.
        samples: group -> samples by device and dtype; of groups whose versions do not count.
        found_inf: GradScaler's, for a fused optimizer: not 0 when the step was skipped inside.
        after: of each group's parameters; None: the step was broken off.
    """

    groups: list[dict[str, Any]]
    marks: list[list[Mark]]
    samples: dict[int, dict[Kind, list[Sample]]]
    found_inf: Tensor | None
    after: list[list[After]] | None = field(default=None)


class StepLog:
    """Records an optimizer's steps by its hooks.

    Args:
        optimizer: one of `INVERTIBLE`.

    Attributes:
        record: the last step's; None when there is none to be undone.
        why: why there is none.
        steps: begun since the log was made.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.record: Record | None = None
        self.why = "none has been taken since its steps are recorded"
        self.steps = 0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget("its state has been loaded since"))

    def forget(self, why: str) -> None:
        """There is nothing to undo, since ..."""
        self.record, self.why = None, why

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        self.record = Record(
            groups=[_settings(group) for group in optimizer.param_groups],
            marks=[[_mark(optimizer, p) for p in group["params"]] for group in optimizer.param_groups],
            samples={i: s for i, group in enumerate(optimizer.param_groups) if (s := _samples(optimizer, group))},
            found_inf=getattr(optimizer, "found_inf", None),
        )

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.record is not None:
            self.record.after = [[_after(p) for p in group["params"]] for group in optimizer.param_groups]


def log_of(optimizer: Optimizer) -> StepLog | None:
    """The optimizer's log, if its steps are recorded."""
    return _LOGS.get(optimizer)


def record_steps(optimizer: Optimizer) -> StepLog | None:
    """Records the optimizer's steps from now on; None if it is none of `INVERTIBLE`."""
    if type(optimizer) not in INVERTIBLE:
        return None
    if (log := _LOGS.get(optimizer)) is None:
        log = _LOGS[optimizer] = StepLog(optimizer)
    return log


_LOGS: weakref.WeakKeyDictionary[Optimizer, StepLog] = weakref.WeakKeyDictionary()


def first_elements(tensor: Tensor) -> Tensor:
    """A copy of a few elements of a tensor's local shard."""
    shard = local(tensor.detach())
    flat = shard.view(-1) if shard.is_contiguous() else shard.reshape(-1)
    return flat[:_ELEMENTS].clone()


def kind_of(tensor: Tensor) -> Kind:
    """Device and dtype."""
    return tensor.device, tensor.dtype


def first_moment(state: Mapping[str, Any]) -> Tensor | None:
    """SGD's buffer, Adam's first moment."""
    found: Tensor | None = state.get("momentum_buffer", state.get("exp_avg"))
    return found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = ((name, value) for name, value in group.items() if name != "params")
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept}


def _mark(optimizer: Optimizer, parameter: Tensor) -> Mark:
    state = optimizer.state.get(parameter)
    if not state:
        return Mark(parameter, parameter._version, None)
    versions = {name: value._version for name, value in state.items() if isinstance(value, Tensor)}
    return Mark(parameter, parameter._version, versions)


def _after(parameter: Tensor) -> After:
    gradient = parameter.grad
    if gradient is None:
        return After(parameter._version, None, 0)
    return After(parameter._version, weakref.ref(gradient), gradient._version)


def _samples(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[Kind, list[Sample]] | None:
    if not group["fused"] and (group["foreach"] is False or not any(hasattr(p, "to_local") for p in group["params"])):
        return None
    alike: dict[Kind, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        alike[kind_of(parameter)].append(parameter)
    found = {}
    for key, parameters in alike.items():
        some = _spread([p for p in parameters if p.grad is not None] or parameters)
        moments = [first_moment(optimizer.state.get(p, {})) for p in some]
        found[key] = [
            Sample(p, first_elements(p), None if m is None else first_elements(m))
            for p, m in zip(some, moments, strict=True)
        ]
    return found


def _spread(parameters: list[Tensor]) -> list[Tensor]:
    last = len(parameters) - 1
    return [parameters[place] for place in sorted({last * i // (_TENSORS - 1) for i in range(_TENSORS)})]
