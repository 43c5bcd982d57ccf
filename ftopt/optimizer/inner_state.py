"""The inner optimizers' state and groups as a tree of plain values and tensors, by the parameters' names, and back.

``load_state_dict`` casts floating-point state to its parameter's dtype, and goes by the order of the parameters. This
restores every bit, with its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ftopt.optimizer.inner import Inner, device_of
from ftopt.optimizer.tensors.flat import local, placed, uncompiled
from ftopt.optimizer.tensors.pool import CopyPool
from ftopt.tree import Tree


def capture(inner: Inner, model: nn.Module, copies: CopyPool) -> list[Tree]:
    """A copy: one entry an inner optimizer. One pass over the state, which stays on its device."""
    names = {id(p): name for name, p in _named(model)}
    found = []
    for optimizer in inner.optimizers:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        state = {
            names[id(p)]: {key: _copy(value, copies) for key, value in optimizer.state[p].items()}
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in names and p in optimizer.state
        }
        found.append({"class": type(optimizer).__name__, "groups": _copy(groups, copies), "state": state})
    return found


def check(inner: Inner, model: nn.Module, saved: list[Tree]) -> None:
    """Raises ValueError: another number of optimizers or groups, another class, or state of a parameter that does not
    fit."""
    have = [(type(o).__name__, len(o.param_groups)) for o in inner.optimizers]
    got = [(entry["class"], len(entry["groups"])) for entry in saved]
    if have != got:
        raise ValueError(f"inner optimizers with so many parameter groups: {got} in the checkpoint, {have} here")
    named = dict(_named(model))
    for optimizer, entry in zip(inner.optimizers, saved, strict=True):
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name in entry["state"]:
            if name not in named or id(named[name]) not in own:
                raise ValueError(f"{entry['class']} has state of {name}, which it does not train here")


def restore(inner: Inner, model: nn.Module, saved: list[Tree]) -> None:
    """Restores a checked capture: the state of parameters that had some, none for the others; not the groups."""
    named = dict(_named(model))
    for optimizer, entry in zip(inner.optimizers, saved, strict=True):
        optimizer.state.clear()
        groups_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, values in entry["state"].items():
            parameter = named[name]
            group = groups_of[id(parameter)]
            optimizer.state[parameter] = {
                key: placed(value.to(device_of(key, value, parameter, group), copy=True), parameter)
                if isinstance(value, Tensor)
                else _copy(value, CopyPool())
                for key, value in values.items()
            }


def restore_groups(inner: Inner, saved: list[Tree]) -> None:
    """Restores the groups' values alone: rates, and what a scheduler has written beside them."""
    for optimizer, entry in zip(inner.optimizers, saved, strict=True):
        for group, values in zip(optimizer.param_groups, entry["groups"], strict=True):
            group.update(_copy(values, CopyPool()))


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All parameters: one that was frozen after the start keeps its state."""
    return [(uncompiled(name), parameter) for name, parameter in model.named_parameters()]


def _copy(value: Any, copies: CopyPool) -> Any:
    if isinstance(value, Tensor):
        return copies.of(local(value))
    if isinstance(value, Mapping):
        return {key: _copy(item, copies) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(item, copies) for item in value)
    return value
