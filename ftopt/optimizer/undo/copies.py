"""Undoes steps that have no inverse here, by copies of parameters and inner state from before the step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ftopt.errors import UserError


class CopiedStep:
    """Copies the parameters and state of any optimizer before each step, by hooks: one pass over them, and as much
    memory again.

    Attributes:
        complete: whether the last step returned without an error.
        steps: number of steps begun since this was set to 0.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.complete, self.steps = False, 0
        self._why = "none has been taken since its steps are recorded"
        self._parameters: list[Tensor] = []
        self._state: dict[Any, Any] = {}
        self._settings: list[dict[str, Any]] = []
        self._versions: list[int] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget("its state has been loaded since"))

    def forget(self, why: str) -> None:
        """Notes that there is nothing to undo, and ``why``."""
        self._why = why

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        self.complete, self._why = False, ""
        now = _parameters(optimizer)
        self._parameters = _copied([p.detach() for p in now], self._parameters)
        self._state = _copied(dict(optimizer.state), self._state)
        self._settings = [_settings(group) for group in optimizer.param_groups]
        self._versions = [p._version for p in now]

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.complete = True
        self._versions = [p._version for p in _parameters(optimizer)]
        for before, group in zip(self._settings, optimizer.param_groups, strict=True):
            for name in [name for name, value in before.items() if _same(group.get(name), value)]:
                del before[name]  # settings that the step did not change stay a schedule's

    def check(self, optimizer: Optimizer) -> None:
        """Raises UserError if there is no step to undo, or the parameters have been changed since."""
        if self._why:
            raise UserError(
                f"undo_step: there is no step to undo: {self._why}; it goes one step back, right after that step"
            )
        now = _parameters(optimizer)
        changed = [n for n, (p, v) in enumerate(zip(now, self._versions, strict=True)) if p._version != v]
        if self.complete and changed:
            raise UserError(
                f"undo_step: parameter {changed[0]} {tuple(now[changed[0]].shape)} has been changed since the step (an "
                "outer step was applied, say); call it before anything else changes the parameters"
            )

    @torch.no_grad()
    def restore(self, optimizer: Optimizer) -> int:
        """Restores everything; returns the number of parameters that the step had changed."""
        reverted = 0
        for p, before in zip(_parameters(optimizer), self._parameters, strict=True):
            if not torch.equal(p, before):
                p.copy_(before)
                reverted += 1
        there = dict(optimizer.state)
        optimizer.state.clear()
        optimizer.state.update(_copied(self._state, there))
        for settings, group in zip(self._settings, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in settings.items() if not _same(group.get(name), value)})
        return reverted


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value, None) for name, value in group.items() if name != "params"}


def _copied(value: Any, into: Any) -> Any:
    """A copy of a value, including tensors in lists and mappings; in the memory of ``into`` where that fits."""
    if isinstance(value, Tensor):
        alike = isinstance(into, Tensor) and into.shape == value.shape
        fits = alike and into.dtype == value.dtype and into.device == value.device
        return into.copy_(value) if fits else value.detach().clone()
    if isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        return {name: _copied(each, known.get(name)) for name, each in value.items()}
    if isinstance(value, list):
        places = into if isinstance(into, list) and len(into) == len(value) else [None] * len(value)
        return [_copied(each, place) for each, place in zip(value, places, strict=True)]
    return copy.deepcopy(value)


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, Tensor) or isinstance(before, Tensor):
        return isinstance(now, Tensor) and isinstance(before, Tensor) and torch.equal(now, before)
    return bool(now == before)
