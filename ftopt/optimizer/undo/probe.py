"""Whether a step that was broken off came to tensors that change all together or not at all, told by a few elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftopt.errors import UserError
from ftopt.optimizer.undo.inverses import Rule
from ftopt.optimizer.undo.record import Sample, first_elements

_ROOM = 32
"""Unit roundoffs by which the inverse may miss what was there before."""


@torch.no_grad()
def took_place(
    samples: Sequence[Sample], stepped: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Any]], rule: Rule
) -> bool:
    """Whether the sampled tensors were stepped, and so all of their group, device and dtype.

    Args:
        samples: from before the step.
        stepped: all of these tensors that a whole step changes, in its order.
        states: the optimizer's, as they are now.
        rule: the group's settings.

    Raises:
        UserError: the elements do not say.
    """
    found = {
        s.parameter: _verdict(s, states.get(s.parameter, {}), rule) for s in samples if s.parameter.grad is not None
    }
    known = {verdict for verdict in found.values() if verdict is not None}
    ends = (found.get(stepped[0]), found.get(stepped[-1]))
    if len(known) != 1 or (None in ends and len(stepped) > len(found)):
        raise broken_inside()
    return known.pop()


def broken_inside() -> UserError:
    """The step cannot be repaired."""
    return UserError(
        "undo_step: cannot tell how far the step has come: it was broken off among fused or sharded tensors of one "
        "group; it can be repaired between groups; restore a checkpoint, or leave the job and join anew"
    )


def _verdict(sample: Sample, state: Mapping[str, Any], rule: Rule) -> bool | None:
    """None: a step makes no difference to these elements.

    Raises:
        UserError: they are neither what they were nor what a step makes of them.
    """
    p = sample.parameter
    assert p.grad is not None
    tensors = {"param": p, "grad": p.grad} | {name: state[name] for name in rule.moments if state.get(name) is not None}
    now = {name: first_elements(tensor).cpu().double() for name, tensor in tensors.items()}
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
        raise broken_inside()
    return fits


def _near(found: Tensor, expected: Tensor, now: Tensor, gradient: Tensor, unit: float) -> bool:
    scale = found.abs() + now.abs() + gradient.abs()
    return bool(((found - expected).abs() <= _ROOM * unit * scale).all())
