"""Samples of tensors without version counts, which show whether an interrupted step reached them.

Fused optimizers, and foreach ones on sharded parameters (DTensor), do not count versions (torch 2.13). They change all
tensors of one device and dtype in a group together, or none, so a few elements of a few tensors show which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.undo.inverses import Rule
from ftopt.step.tensors.flat import local

_TENSORS, _ELEMENTS = 4, 16
"""Number of tensors sampled of a group, device and dtype (including the first and the last), and of elements of
each."""
_ROOM = 32
"""Unit roundoffs by which the inverse may miss the previous value."""

Kind = tuple[torch.device, torch.dtype]
"""Device and dtype: one operation changes all tensors of a kind in a group."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The first elements of a parameter and of its first moment (None: there was none) before a step."""

    parameter: Tensor
    values: Tensor
    moment: Tensor | None


def kind_of(tensor: Tensor) -> Kind:
    return tensor.device, tensor.dtype


def samples_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[Kind, list[Sample]]:
    """Samples of a parameter group; empty if its tensors count versions."""
    sharded = any(hasattr(p, "to_local") for p in group["params"])
    if not (group.get("fused") or (group["foreach"] is not False and sharded)):
        return {}
    alike: dict[Kind, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        alike[kind_of(parameter)].append(parameter)
    found = {}
    for kind, parameters in alike.items():
        some = [p for p in parameters if p.grad is not None] or parameters
        last = len(some) - 1
        places = sorted({last * i // (_TENSORS - 1) for i in range(_TENSORS)})
        found[kind] = [_sample(some[place], optimizer.state.get(some[place], {})) for place in places]
    return found


@torch.no_grad()
def took_place(
    samples: Sequence[Sample], counted: Mapping[Tensor, int], states: Mapping[Tensor, Mapping[str, Any]], rule: Rule
) -> bool:
    """Whether a step reached the tensors of one kind in a group. UserError: the samples do not show it.

    Args:
        samples: taken before the step.
        counted: the increase of each of these tensors' step counts, in the step's order.
        states: the optimizer's present states.
    """
    stepped = [p for p in counted if p.grad is not None]
    counts = {counted[p] for p in stepped}
    if not stepped or ("exp_avg" in rule.moments and counts == {0}):  # Adam counts first
        return False
    if len(counts) > 1:
        raise _broken_inside()
    found = {
        s.parameter: _verdict(s, states.get(s.parameter, {}), rule) for s in samples if s.parameter.grad is not None
    }
    known = {verdict for verdict in found.values() if verdict is not None}
    ends = (found.get(stepped[0]), found.get(stepped[-1]))
    if len(known) != 1 or (None in ends and len(stepped) > len(found)):
        raise _broken_inside()
    return known.pop()


def _broken_inside() -> UserError:
    return UserError(
        "undo_step: cannot tell how far the step has come: it was broken off among fused or sharded tensors of one "
        "group; it can be repaired between groups; restore a checkpoint, or leave the job and join anew"
    )


def _sample(parameter: Tensor, state: Mapping[str, Any]) -> Sample:
    moment = state.get("momentum_buffer", state.get("exp_avg"))
    return Sample(parameter, _first_elements(parameter), None if moment is None else _first_elements(moment))


def _first_elements(tensor: Tensor) -> Tensor:
    shard = local(tensor.detach())
    flat = shard.view(-1) if shard.is_contiguous() else shard.reshape(-1)
    return flat[:_ELEMENTS].clone()


def _verdict(sample: Sample, state: Mapping[str, Any], rule: Rule) -> bool | None:
    """Whether the sampled tensor was stepped; None: a step does not change these elements. UserError: they match
    neither their values before nor those after a step."""
    p = sample.parameter
    assert p.grad is not None
    tensors = {"param": p, "grad": p.grad} | {name: state[name] for name in rule.moments if state.get(name) is not None}
    now = {name: _first_elements(tensor).cpu().double() for name, tensor in tensors.items()}
    then = {"param": sample.values.cpu().double()}
    for moment in (name for name in rule.moments[:1] if name in now):
        then[moment] = torch.zeros_like(now[moment]) if sample.moment is None else sample.moment.cpu().double()
    same = all(torch.equal(now[name], value) for name, value in then.items())
    first = sample.moment is None and "momentum_buffer" in rule.moments
    before = rule.before(now, rule.whole, t=float(state.get("step", 1)), first=first)
    unit = torch.finfo(p.dtype).eps / 2
    fits = all(
        _near(before[name], value, now[name], now["grad"], unit) for name, value in then.items() if name in before
    )
    if same == fits:
        if fits:
            return None
        raise _broken_inside()
    return fits


def _near(found: Tensor, expected: Tensor, now: Tensor, gradient: Tensor, unit: float) -> bool:
    scale = found.abs() + now.abs() + gradient.abs()
    return bool(((found - expected).abs() <= _ROOM * unit * scale).all())
