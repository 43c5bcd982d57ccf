"""A digest of a machine's arithmetic: replicas on different kinds of machines get different bits, and drift apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ftopt.methods.torch_optimizers import step_without_hooks
from ftopt.step.inner import Inner
from ftopt.step.tensors.digest import digest

_SHAPE = (67, 61)
"""Odd, so that it includes the ends of vectorized loops."""
_STEPS = 3


def arithmetic_of(inner: Inner, like: Tensor) -> str:
    """The digest of some steps on fixed values, equal on machines that compute the same bits.

    Takes steps with new optimizers of the inner optimizers' classes, if these are torch's, with their options; and with
    SGD with momentum and with AdamW. Takes milliseconds, and uses no random numbers.

    Args:
        like: a parameter that trains, which determines device and dtype.
    """
    found: dict[str, Tensor] = {}
    for number, (kind, options) in enumerate(_optimizers(inner)):
        parameter = nn.Parameter(_values(1).to(like.device, like.dtype))
        try:
            optimizer = kind([{**options, "params": [parameter], "lr": 1e-2}])  # type: ignore[call-arg]
            for step in range(_STEPS):
                parameter.grad = _values(2 + step).to(like.device, like.dtype)
                step_without_hooks(optimizer)
        except Exception:  # it needs a closure, sparse gradients or other shapes, on all machines
            continue
        found[str(number)] = parameter.detach()
    return digest(found)


def _optimizers(inner: Inner) -> list[tuple[type[torch.optim.Optimizer], dict[str, object]]]:
    kinds: list[tuple[type[torch.optim.Optimizer], dict[str, object]]] = [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
    ]
    for optimizer in inner.optimizers:
        if type(optimizer).__module__.startswith("torch.optim."):  # constructing others may have side effects
            group = optimizer.param_groups[0]
            kinds.append((type(optimizer), {key: value for key, value in group.items() if key != "params"}))
    return kinds


def _values(seed: int) -> Tensor:
    """Numbers in [-0.5, 0.5), computed from integers: the same everywhere."""
    count = math.prod(_SHAPE)
    mixed = (torch.arange(count, dtype=torch.int64) * 40503 + seed * 9973) * 2654435761 % (1 << 24)
    return (mixed.to(torch.float32) / (1 << 24) - 0.5).view(_SHAPE)
