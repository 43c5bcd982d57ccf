"""The extra state of the model's modules (``get_extra_state``: observers, FP8 histories), each rank's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ftopt.common.tree import Tree, rebuilt, refusal
from ftopt.errors import FtoptError
from ftopt.step.tensors.flat import some, uncompiled

_log = logging.getLogger(__name__)


def _keepers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield uncompiled(f"{name}." if name else "") + "_extra_state", module


def states(model: nn.Module) -> dict[str, Any]:
    """The extra states, by their names in the model's state dict."""
    return {name: module.get_extra_state() for name, module in _keepers(model)}


def refusals(model: nn.Module) -> list[str]:
    """The reason for each extra state that a checkpoint leaves out because it cannot hold it."""
    return [reason for name, state in states(model).items() if (reason := refusal(state, name))]


def capture(model: nn.Module, copy: Callable[[Tensor], Tensor]) -> Tree:
    """A copy of the extra states that a checkpoint can hold."""
    found = states(model)
    return {n: rebuilt(x, lambda tensor, where: copy(tensor.detach())) for n, x in found.items() if not refusal(x, n)}


def restore(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Restores the modules' extra states. FtoptError: a module refuses its own."""
    keepers = dict(_keepers(model))
    if strangers := [name for name in saved if name not in keepers]:
        _log.warning("the checkpoint holds %s, which no module of this model keeps; they are left out", some(strangers))
    for name, state in saved.items():
        if name not in keepers:
            continue
        try:
            keepers[name].set_extra_state(state)
        except Exception as error:
            raise FtoptError(f"{name}: set_extra_state() raises {type(error).__name__}: {error}") from error
