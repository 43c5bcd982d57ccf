"""Computes before a run what it will do: when each fragment is sent, how many bytes, how much memory.

The numbers assume all replicas and no faults, with triggers and pacing at the latest time that they allow.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftopt.codecs import codec_named
from ftopt.config.schema import Recipe
from ftopt.methods import Method
from ftopt.transport.encoded import sent_bytes

_TOY = (64, 64)  # large enough for 8-bit states


@dataclass(frozen=True)
class FragmentPlan:
    """The plan of one fragment.

    Args:
        what: ``gradients`` or ``parameters``.
        elements: number of elements sent.
        bytes: bytes that each replica sends in one outer step.
        first, every: the first inner step at which it is due, and the inner steps between two.
        delay: inner steps from being due until the result is applied.
        times: its outer steps in the whole job.
    """

    what: str
    elements: int
    bytes: int
    first: int
    every: int
    delay: int
    times: int


@dataclass(frozen=True)
class Plan:
    """The plan of the job.

    Args:
        parameters, trained: elements of the model, and trainable ones.
        fragments: in their order.
        memory: what -> bytes of a replica. An estimate.
        inner_steps: the inner step at which the job ends.
    """

    parameters: int
    trained: int
    fragments: list[FragmentPlan]
    memory: Mapping[str, int]
    inner_steps: int


def plan_of(recipe: Recipe, model: nn.Module, inner: Sequence[Optimizer], partition: Sequence[Sequence[str]]) -> Plan:
    """The plan of a recipe whose objects `ftopt.run.check` has made."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    trained, method = sum(sizes.values()), recipe.method
    state = {id(optimizer): _state_bytes(optimizer) for optimizer in inner}
    moments = max(state.values(), default=0) // 4 if method.inner_state == "average" else 0
    parts = [(1 + moments) * sum(sizes[name] for name in names) for names in partition]
    every, end = _end(recipe)
    fragments = []
    if method.gradients is not None:
        each = method.gradients.sync_every
        fragments.append(_fragment(recipe, "gradients", trained, first=each, every=each, delay=0, end=end))
    timing = method.timing
    for index, elements in enumerate(parts if method.gradients is not method else []):
        first = every - timing.phase(index, len(parts), 0)
        delay = method.overlap.delay
        fragments.append(_fragment(recipe, "parameters", elements, first=first, every=every, delay=delay, end=end))
    return Plan(
        sum(p.numel() for p in model.parameters()),
        trained,
        fragments,
        _memory(recipe, model, inner, state, fragments),
        end,
    )


def _end(recipe: Recipe) -> tuple[int, int]:
    """The period, and the inner step of the job's end, at the end of a round of fragment 0."""
    method = recipe.method
    every, pacing = method.sync_every, method.timing.pacing
    if pacing is not None and pacing.round_steps is not None:
        every = math.ceil(pacing.round_steps / recipe.replicas)
    first = 1 if method.gradients is not None and method.gradients is not method else every
    return every, math.ceil(recipe.train.inner_steps / first) * first


def _fragment(
    recipe: Recipe, what: str, elements: int, *, first: int, every: int, delay: int, end: int
) -> FragmentPlan:
    n = recipe.replicas
    codec = codec_named(recipe.method.codec)
    sent = sent_bytes(elements, codec, [1 / n] * n, rank=0) if n > 1 else 0
    return FragmentPlan(what, elements, sent, first, every, delay, max(0, (end - first) // every + 1))


def _memory(
    recipe: Recipe,
    model: nn.Module,
    inner: Sequence[Optimizer],
    state: Mapping[int, int],
    fragments: Sequence[FragmentPlan],
) -> dict[str, int]:
    method: Method = recipe.method
    trained = [p for p in model.parameters() if p.requires_grad]
    elements, largest = sum(p.numel() for p in trained), max(fragment.elements for fragment in fragments)
    outer = len(method.init(torch.zeros(1)))
    found = {
        "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
        "buffers": sum(b.numel() * b.element_size() for b in model.buffers()),
        "gradients": sum(p.numel() * p.element_size() for p in trained),
        "inner optimizer": sum(state[id(o)] * p.numel() for o in inner for g in o.param_groups for p in g["params"]),
    }
    committed = 4 * elements * (1 + outer)
    if recipe.train.state_dir is None:
        found["anchor and outer optimizer"] = committed
    found["an outer step under way"] = 4 * largest * (1 + (outer if recipe.train.state_dir is None else 0))
    if method.overlap.delay:
        found["frozen parameters"] = 4 * largest
    if recipe.method.codec != "fp32" and recipe.method.error_feedback:
        found["error feedback"] = 4 * elements
    return {what: size for what, size in found.items() if size}


def _state_bytes(optimizer: Optimizer) -> int:
    """Bytes per element of an inner optimizer's state, measured by a step on a toy; 0 if that fails."""
    toy = nn.Parameter(torch.zeros(_TOY))
    toy.grad = torch.zeros(_TOY)
    takes = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key in takes and key != "params"}
    try:
        small = type(optimizer)([toy], **settings)
        small.step()
    except Exception:  # a user's class may raise anything for a foreign parameter
        return 0
    kept = [t for t in small.state[toy].values() if isinstance(t, Tensor) and t.numel() == toy.numel()]
    return sum(part.nbytes for t in kept for part in _parts(t)) // toy.numel()


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors of which a quantized one consists, such as codes and scales; else itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]
