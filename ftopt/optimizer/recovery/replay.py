"""What a replica was at the start of its round, and how another process goes on from that (``recover: replay``).

The copy is made when the training thread has taken up an outer step that the replica was in. In it are the inner
optimizers' state, buffers, the random number generators, error feedback, and where pending work was left (overlapping
outer steps, other fragments) that work with the anchor that it is measured from. What is not in it everybody has: the
committed state. Rates and other values of parameter groups are the loop's, which sets them by the job's inner step.

With the units in the order in which they were granted that is all that an inner step depends on: the steps are done
again by training on, bit for bit if the committed state is still the same and the machine is of the same kind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ftopt.optimizer import inner_state
from ftopt.optimizer.inner import Inner
from ftopt.optimizer.outer.fragment import Base, Fragment
from ftopt.optimizer.outer.step import OuterStep
from ftopt.optimizer.recovery.adopt import add_residuals
from ftopt.optimizer.recovery.capture import buffers, of_residual
from ftopt.optimizer.tensors.digest import digest
from ftopt.optimizer.tensors.flat import FlatView, uncompiled
from ftopt.optimizer.tensors.pool import CopyPool
from ftopt.rng import get_rng_state, set_rng_state
from ftopt.sync.group import Inherited
from ftopt.tree import flatten, unflatten


@dataclass(frozen=True)
class Replay:
    """Steps that are done again.

    Args:
        of: replica and incarnation that had done them.
        steps: how many.
        until: the job's inner step when they are done.
        pending: inner steps of each fragment that were taken over as they were.
    """

    of: tuple[str, int]
    steps: int
    until: int
    pending: tuple[int, ...]


@torch.no_grad()
def copy_of(outer: OuterStep, inner: Inner, model: nn.Module, copies: CopyPool) -> tuple[str, dict[str, Tensor]]:
    """The copy: a text and tensors. Training thread, between two inner steps; a pass over the inner state.

    Raises:
        UserError: the inner state holds what cannot be copied; says what.
    """
    with outer.lock:
        bases = [fragment.seen() for fragment in outer.fragments]
    value = {
        "inner_step": outer.inner_step(),
        "fragments": [_of_fragment(outer, f, base, copies) for f, base in zip(outer.fragments, bases, strict=True)],
        "inner": inner_state.capture(inner, model, copies),
        "buffers": {uncompiled(name): copies.of(buffer) for name, buffer in buffers(model)},
        "rng": get_rng_state(),
    }
    tensors: dict[str, Tensor] = {}
    plain = flatten(value, tensors)
    return json.dumps({"value": plain, "digest": digest(tensors)}, separators=(",", ":")), tensors


def _of_fragment(outer: OuterStep, fragment: Fragment, base: Base, copies: CopyPool) -> dict[str, Any]:
    steps = outer.local_steps - base.step
    view = fragment.view
    return {
        "steps": steps,
        "tokens": outer.tokens - base.tokens,
        "marked_ago": outer.local_steps - fragment.trigger_from_step,
        "params": view.read(copies.empty((view.numel,), torch.float32, view.device)) if steps else None,
        "base": fragment.start if steps else None,
        "residuals": {units: of_residual(left) for units, left in base.residuals.items()},
    }


@torch.no_grad()
def take_up(outer: OuterStep, inner: Inner, model: nn.Module, inherited: Inherited) -> Replay:
    """Makes this replica, which has just fetched the committed state, what the copy says. Training thread.

    Raises:
        ValueError: the copy is damaged or of another model; nothing has changed.
    """
    value = _checked(outer, inner, model, inherited)
    parts: list[dict[str, Any]] = value["fragments"]
    outer.local_steps = max(part["steps"] for part in parts)
    outer.tokens = max(part["tokens"] for part in parts)
    for fragment, part in zip(outer.fragments, parts, strict=True):
        fragment.base_step = outer.local_steps - part["steps"]
        fragment.base_tokens = outer.tokens - part["tokens"]
        if part["params"] is not None:
            _move(fragment, part["params"], part["base"])
        add_residuals(fragment, part["residuals"])
        outer.restart_trigger(fragment, anew=False)
        fragment.trigger_from_step -= part["marked_ago"]
    inner_state.restore(inner, model, value["inner"], groups=False)
    for name, buffer in buffers(model):
        buffer.copy_(value["buffers"][uncompiled(name)])
    set_rng_state(value["rng"])
    steps = max(0, inherited.inner_step - int(value["inner_step"]))
    pending = tuple(outer.pending_steps(fragment.index) for fragment in outer.fragments)
    return Replay(inherited.copy.incarnation_id, steps, outer.inner_step() + steps, pending)


def _move(fragment: Fragment, params: Tensor, base: Tensor) -> None:
    """Puts pending work onto the committed state: as it was, or as a rebase moves it."""
    view = fragment.view
    params, base = params.to(view.device), base.to(view.device)
    view.write(params if torch.equal(base, fragment.start) else fragment.start + (params - base))


def _checked(outer: OuterStep, inner: Inner, model: nn.Module, inherited: Inherited) -> dict[str, Any]:
    copy = inherited.copy
    try:
        outside = json.loads(copy.text)
        if outside["digest"] != digest(copy.tensors):
            raise ValueError("it was damaged on its way")
        value: dict[str, Any] = unflatten(outside["value"], copy.tensors)
        inner_state.check(inner, model, value["inner"])
        pairs = zip(outer.fragments, value["fragments"], strict=True)
        shapes = [_fits(fragment.view, part) for fragment, part in pairs]
        kept = {uncompiled(name): buffer.shape for name, buffer in buffers(model)}
        if not all(shapes) or kept != {name: buffer.shape for name, buffer in value["buffers"].items()}:
            raise ValueError("its tensors are not of this model")
        if len(copy.versions) != len(outer.fragments) or set(value["rng"]) < {"torch", "python"}:
            raise ValueError("a part is missing")
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"it is no copy of a replica: {error!r}") from None
    return value


def _fits(view: FlatView, part: dict[str, Any]) -> bool:
    """Whether pending work fits: both tensors, or no steps."""
    both = (part["params"], part["base"])
    return both == (None, None) if not part["steps"] else all(t.shape == (view.numel,) for t in both)
