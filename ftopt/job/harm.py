"""What a fault does inside a replica: memory that flips, numbers that are none, a network that is gone.

The one place that reaches into the optimizer in order to break it. `ftopt.faults` decides when.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import ftopt
from ftopt.events import Event
from ftopt.faults.injector import Action
from ftopt.faults.spec import GRADIENT_KINDS, Fault
from ftopt.optimizer.outer.fragment import Fragment
from ftopt.sync.replica.client import Client

_BIT = 1 << 22
"""The highest bit of a float's mantissa: the number changes by up to a half."""


class Harm:
    """The actions that need a replica's own objects.

    Args:
        optimizer: the replica's; it need not have started yet.
        group: its group.
    """

    def __init__(self, optimizer: ftopt.OuterOptimizer, group: ftopt.ReplicaGroup) -> None:
        self._core = optimizer._core
        self._group = group
        self._chance = torch.Generator().manual_seed(zlib.crc32(group.replica.encode()))

    def actions(self) -> Mapping[str, Action]:
        """``corrupt``, ``nan`` and ``partition``, for `FaultInjector.learn`."""
        return {"corrupt": self._corrupt, "nan": self._nan, "partition": self._partition}

    @torch.no_grad()
    def _corrupt(self, fault: Fault, event: Event) -> None:
        if fault.aim in GRADIENT_KINDS:
            corrupt(self._gradients(), fault.aim, fault.size or 0.0, self._chance)
            return
        flip_bit(self._target(self._core.started().fragments[event.fragment or 0], fault.aim))

    @torch.no_grad()
    def _nan(self, fault: Fault, event: Event) -> None:
        model = self._core.model
        assert model is not None
        parameter = next(p for p in model.parameters() if p.requires_grad)
        target = parameter.grad if fault.aim == "grads" else parameter
        if target is not None:
            target.view(-1)[0] = float("nan")

    def _partition(self, fault: Fault, event: Event) -> None:
        assert isinstance(self._group, Client) and fault.for_s is not None
        self._group.cut(fault.for_s)

    def _gradients(self) -> list[Tensor]:
        model = self._core.model
        assert model is not None
        return [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]

    def _target(self, fragment: Fragment, what: str) -> Tensor:
        if what == "anchor":
            return fragment.state.anchor
        if what == "outer":
            return max(fragment.state.outer.values(), key=lambda t: float(t.abs().max()))
        if what == "sum":
            reduced = self._core.started().reduction.reduced
            assert reduced is not None
            return reduced
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
