"""The effects of a fault inside a replica: flipped bits in memory, numbers that are NaN, a network that is cut.

Only this module reaches into the optimizer to break it. `ftopt.run.fault_injector` decides when.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import ftopt
from ftopt.events import Event
from ftopt.run.fault_injector import Action
from ftopt.run.fault_spec import GRADIENT_KINDS, Fault
from ftopt.step.outer.step import OuterStep
from ftopt.step.outer.usual import USUAL
from ftopt.sync.replica.client import Client

BIT = 22
"""The highest bit of a float's mantissa: flipping it changes the number by up to a half."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def harm(optimizer: ftopt.ReplicaOptimizer, group: ftopt.ReplicaGroup) -> Mapping[str, Action]:
    """Returns the actions that need a replica's own objects, for `FaultInjector.learn`. The optimizer may not have
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
            bit = BIT if fault.bit is None else fault.bit
            flip_bit(targets(fault.aim, event.fragment or 0), bit=bit, element=fault.element)

    def targets(what: str, fragment: int) -> list[Tensor]:
        match what:
            case "params":
                return [p.data for p in trained()]
            case "grads":
                return [p.grad for p in trained() if p.grad is not None]
            case "inner":
                return _inner_state(core.inner.optimizers, trained())
        return _outer_tensors(core.started(), fragment, what)

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


def _inner_state(optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The inner optimizers' state per element: momenta, second moments."""
    states = [optimizer.state[p] for p in parameters for optimizer in optimizers if p in optimizer.state]
    kept = [t for state in states for t in state.values() if isinstance(t, Tensor)]
    return [t for t in kept if t.dim() and t.is_floating_point()]


def _outer_tensors(outer: OuterStep, index: int, what: str) -> list[Tensor]:
    fragment = outer.fragments[index]
    if what in ("payload", "sum"):
        assert outer.reduction.reduced is not None
        return [outer.reduction.reduced]
    if what == "result":
        assert fragment.result is not None
        # A fragment of gradients has an anchor of 0; its agreed gradient is in its outer state.
        gradients = fragment is outer.gradients
        return list(fragment.result.outer.values()) if gradients else [fragment.result.anchor]
    if fragment is outer.gradients and len(outer.fragments) > 1:
        fragment = outer.fragments[1]
    state = fragment.state
    if what == "anchor":
        return [state.anchor]
    # Not the record of usual norms, if there is another tensor: its greatest number changes in each outer step.
    floats = {name: t for name, t in state.outer.items() if t.is_floating_point()}
    return [t for name, t in floats.items() if name != USUAL] or list(floats.values())


def flip_bit(tensors: Sequence[Tensor], *, bit: int = BIT, element: int | None = None) -> None:
    """Flips one bit of one element of the tensors, in place; does nothing if they are empty.

    Args:
        bit: from 0; for elements narrower than fp32, modulo their width.
        element: index through all tensors, modulo their number of elements. Default: the greatest in magnitude.
    """
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return
    if element is None:
        target = max(tensors, key=lambda t: float(t.abs().max()))
        element = int(target.abs().argmax())
    else:
        element %= sum(t.numel() for t in tensors)
        for target in tensors:
            if element < target.numel():
                break
            element -= target.numel()
    width = target.element_size()
    bit %= 8 * width
    mask = -(1 << bit) if bit == 8 * width - 1 else 1 << bit
    place = torch.unravel_index(torch.tensor(element), target.shape)
    target.view(_INTEGERS[width])[place] ^= mask


def corrupt(tensors: Sequence[Tensor], how: str, size: float, chance: torch.Generator) -> None:
    """Corrupts a replica's gradients, in place; see ``what`` of `ftopt.run.fault_spec.Fault`."""
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
