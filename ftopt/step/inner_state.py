"""The inner optimizers' state and groups as a tree of plain values and tensors, by the parameters' names, and back.

``load_state_dict`` casts floating-point state to its parameter's dtype, and relies on the order of the parameters. This
module restores every bit, with its dtype. It includes the values that an optimizer keeps in its state beside the
parameters (MADGRAD's ``k``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ftopt.common.tree import Tree, rebuilt, refusal
from ftopt.step.inner import Inner, beside, device_of, like, put_beside
from ftopt.step.tensors.flat import local, placed, uncompiled
from ftopt.step.tensors.pool import CopyPool


def capture(inner: Inner, model: nn.Module, copies: CopyPool) -> list[Tree]:
    """A copy with one entry per inner optimizer. One pass over the state, which stays on its device."""
    names = {id(p): name for name, p in _named(model)}
    found = []
    for optimizer in inner.optimizers:
        groups = [
            {key: value for key, value in _values(group) if not refusal(value, key)} for group in optimizer.param_groups
        ]
        state = {
            names[id(p)]: _copy(optimizer.state[p], copies)
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in names and p in optimizer.state
        }
        entry = {"class": type(optimizer).__name__, "groups": _copy(groups, copies), "state": state}
        found.append(entry | {"beside": beside_of(optimizer, copies)})
    return found


def beside_of(optimizer: Optimizer, copies: CopyPool) -> Tree:
    """A copy of the values in the optimizer's state beside the parameters."""
    return {key: _copy(value, copies) for key, value in beside(optimizer.state).items()}


def refusals(inner: Inner) -> list[str]:
    """The reason for each group value that a checkpoint leaves out because it cannot hold it."""
    groups = [(i, group) for optimizer in inner.optimizers for i, group in enumerate(optimizer.param_groups)]
    named = [(f"param_groups[{i}][{key!r}]", value) for i, group in groups for key, value in _values(group)]
    return [reason for name, value in named if (reason := refusal(value, name))]


def check(inner: Inner, model: nn.Module, saved: list[Tree]) -> None:
    """Raises ValueError if the number of optimizers or groups, a class, or a parameter's state does not fit."""
    have = [(type(o).__name__, len(o.param_groups)) for o in inner.optimizers]
    got = [(entry["class"], len(entry["groups"])) for entry in saved]
    if have != got:
        raise ValueError(f"parameter groups of the inner optimizers: {got} in the checkpoint, {have} here")
    named = dict(_named(model))
    for optimizer, entry in zip(inner.optimizers, saved, strict=True):
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name in entry["state"]:
            if name not in named or id(named[name]) not in own:
                raise ValueError(f"{entry['class']} has state of {name}, which it does not train here")


def restore(inner: Inner, model: nn.Module, saved: list[Tree]) -> None:
    """Restores a checked capture: the captured state of parameters, and none for the others; not the groups."""
    named = dict(_named(model))
    for optimizer, entry in zip(inner.optimizers, saved, strict=True):
        put_beside(optimizer, entry["beside"])
        for key in [key for key in optimizer.state if isinstance(key, Tensor)]:
            del optimizer.state[key]
        groups_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, values in entry["state"].items():
            parameter = named[name]
            give = partial(_given, parameter, groups_of[id(parameter)])
            optimizer.state[parameter] = rebuilt(values, give)


def _given(parameter: Tensor, group: Mapping[str, Any], value: Tensor, where: str) -> Tensor:
    """A tensor of a parameter's state, on the device where torch keeps it."""
    device = device_of(where.partition(".")[0], value, parameter, group)
    return placed(value.to(device, copy=True), parameter)


def restore_groups(inner: Inner, saved: list[Tree]) -> None:
    """Restores the groups' values alone: rates, and values that a scheduler has written beside them."""
    for optimizer, entry in zip(inner.optimizers, saved, strict=True):
        for group, values in zip(optimizer.param_groups, entry["groups"], strict=True):
            group.update({key: like(value, group.get(key)) for key, value in values.items()})


def _values(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in group.items() if key != "params"]


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All parameters by name, since one that was frozen after the start keeps its state."""
    return [(uncompiled(name), parameter) for name, parameter in model.named_parameters()]


def _copy(value: Any, copies: CopyPool) -> Any:
    return rebuilt(value, lambda tensor, where: copies.of(local(tensor)))
