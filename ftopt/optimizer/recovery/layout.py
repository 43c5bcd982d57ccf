"""Where each tensor of the model's state dict is in a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ftopt.optimizer.outer.step import OuterStep
from ftopt.optimizer.tensors.flat import FlatView, uncompiled


def layout(outer: OuterStep, model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The places, as JSON, and the tensors that never change.

    Returns:
        ``tensors``: name -> ``in``: a fragment's number, ``model`` (of a method whose replicas hold the model alike),
        ``buffers`` (each replica's own) or ``fixed``; with ``start``, ``stop``, ``shape`` and ``dtype`` where it is a
        part of a flat fp32 tensor, else with ``name``. ``tied``: other names -> the first name of the same tensor.
        And the fixed tensors by name, by reference.
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
        elif number in buffers:
            places[name] = {"in": "buffers", "name": where}
        else:
            places[name] = {"in": "fixed", "name": name}
            fixed[name] = value.detach()
    return {"tensors": places, "tied": tied}, fixed


def _flat(outer: OuterStep) -> dict[str, Any]:
    """What lies in flat tensors: the fragments', or the model's where it is the committed state itself."""
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
