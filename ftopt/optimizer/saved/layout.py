"""The place of each tensor of the model's state dict in a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ftopt.common.tree import flatten, refusal
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import FlatView, local, uncompiled


def layout(outer: OuterStep, model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The places, as JSON, and the tensors that never change.

    Returns:
        ``tensors``: name -> ``in``: a fragment's number, ``model`` (for a method whose replicas share the model),
        ``buffers`` (each replica's own), ``fixed``, or ``nowhere``, with the ``reason``. A part of a flat fp32 tensor
        has ``start``, ``stop``, ``shape`` and ``dtype``, a buffer its ``name``, a fixed tensor a ``value``
        (`ftopt.common.tree`). ``tied``: other names -> the first name of the same tensor. And the fixed tensors by
        name, by reference.
    """
    flat = _flat(outer)
    buffers = {id(buffer): uncompiled(name) for name, buffer in model.named_buffers()}
    places: dict[str, Any] = {}
    tied: dict[str, str] = {}
    fixed: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    parameters = {id(p): uncompiled(name) for name, p in model.named_parameters()}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        name, number = uncompiled(key), id(value)
        if number in first:
            tied[name] = first[number]
            continue
        first[number] = name
        where = parameters.get(number) or buffers.get(number, "")
        if where in flat:
            places[name] = flat[where]
        elif reason := refusal(local(value), name):
            places[name] = {"in": "nowhere", "reason": reason}
        elif number in buffers:
            places[name] = {"in": "buffers", "name": where}
        else:
            places[name] = {"in": "fixed", "value": flatten(local(value), fixed, name)}
    return {"tensors": places, "tied": tied}, fixed


def refusals(model: nn.Module) -> list[str]:
    """The reason for each tensor of the model's state dict that a checkpoint leaves out because it cannot hold it."""
    named = {
        id(x): (uncompiled(key), x) for key, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)
    }
    return [
        reason for name, value in named.values() if not value.requires_grad and (reason := refusal(local(value), name))
    ]


def _flat(outer: OuterStep) -> dict[str, Any]:
    """The places in flat tensors: the fragments', or the model's if that is the committed state."""
    views: list[tuple[int | str, FlatView]] = [(f.index, f.view) for f in outer.fragments if f is not outer.gradients]
    if outer.live is not None:
        views.append(("model", outer.live.view))
    return {
        span.name: {
            "in": where, "start": span.start, "stop": span.stop, "shape": list(shape),
            "dtype": str(dtype).removeprefix("torch."),
        }
        for where, view in views
        for span, shape, dtype in view.in_whole()
    }  # fmt: skip
