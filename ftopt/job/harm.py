"""What a fault does inside a replica: memory that flips, numbers that are none, a network that is gone.

The one place that reaches into the optimizer in order to break it. `ftopt.faults` decides when.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import ftopt
from ftopt.events import Event
from ftopt.faults.injector import Action
from ftopt.faults.spec import GRADIENT_KINDS, Fault
from ftopt.optimizer.outer.step import OuterStep
from ftopt.sync.replica.client import Client

_BIT = 1 << 22
"""The highest bit of a float's mantissa: the number changes by up to a half."""


def harm(optimizer: ftopt.OuterOptimizer, group: ftopt.ReplicaGroup) -> Mapping[str, Action]:
    """Returns the actions that need a replica's own objects, for `FaultInjector.learn`. The optimizer need not have
    started yet."""
    core = optimizer._core
    chance = torch.Generator().manual_seed(zlib.crc32(group.replica.encode()))

    def trained() -> list[nn.Parameter]:
        assert core.model is not None
        return [p for p in core.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def change(fault: Fault, event: Event) -> None:
        if fault.aim in GRADIENT_KINDS:
            gradients = [p.grad for p in trained() if p.grad is not None]
            corrupt(gradients, fault.aim, fault.size or 0.0, chance)
        else:
            flip_bit(_target(core.started(), event.fragment or 0, fault.aim))

    @torch.no_grad()
    def nan(fault: Fault, event: Event) -> None:
        first = trained()[0]
        target = first.grad if fault.aim == "grads" else first
        if target is not None:
            target.view(-1)[0] = float("nan")

    def partition(fault: Fault, event: Event) -> None:
        assert isinstance(group, Client) and fault.for_s is not None
        group.cut(fault.for_s)

    return {"corrupt": change, "nan": nan, "partition": partition}


def _target(outer: OuterStep, index: int, what: str) -> Tensor:
    fragment = outer.fragments[index]
    match what:
        case "anchor":
            return fragment.state.anchor
        case "outer":
            return max(fragment.state.outer.values(), key=lambda t: float(t.abs().max()))
        case "sum":
            assert outer.reduction.reduced is not None
            return outer.reduction.reduced
    assert fragment.result is not None
    return fragment.result.anchor


def flip_bit(flat: Tensor) -> None:
    """Flips one bit of the fp32 tensor's greatest element, in place."""
    index = int(flat.abs().argmax())
    flat.view(torch.int32)[index] ^= _BIT


def corrupt(tensors: Sequence[Tensor], how: str, size: float, chance: torch.Generator) -> None:
    """Spoils a replica's gradients, in place; see ``what`` of `ftopt.faults.spec.Fault`."""
    if how == "stuck":
        tensors[0].view(-1)[0] = size
        return
    if how == "bit":
        target = tensors[int(torch.randint(len(tensors), (1,), generator=chance))].view(-1)
        index = int(torch.randint(target.numel(), (1,), generator=chance))
        bit = int(torch.randint(31, (1,), generator=chance))
        bits = target[index : index + 1].float().view(torch.int32) ^ (1 << bit)
        target[index] = bits.view(torch.float32)[0].to(target.dtype)
        return
    for tensor in tensors:
        noise = torch.randn(tensor.shape, generator=chance) * math.sqrt(size) if how == "noise" else size
        tensor.add_(noise)
