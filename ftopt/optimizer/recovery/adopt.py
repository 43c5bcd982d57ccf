"""What a replica takes over that is there after a checkpoint of others that are not: their pending work.

Their work is added to its own on the newest anchor, as a rebase would move it, and goes out with its next contribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ftopt.optimizer.outer.error_feedback import Residual
from ftopt.optimizer.outer.fragment import Fragment, State, check_fetched
from ftopt.optimizer.outer.step import OuterStep
from ftopt.optimizer.recovery.capture import CommittedVersion, SavedReplica
from ftopt.optimizer.tensors.flat import FlatView
from ftopt.sync.group import Committed, Held, Record
from ftopt.tree import Tree


@dataclass(frozen=True)
class _AdoptedWork:
    """Pending work of one replica on one fragment: ``delta``, by which it has moved the parameters since."""

    delta: Tensor
    steps: int
    tokens: int


def _work(view: FlatView, saved: SavedReplica, index: int, newest: CommittedVersion) -> _AdoptedWork:
    """What the newest version in the checkpoint does not count of it."""
    own, part = saved.own, saved.own["fragments"][index]
    if part["params"] is None:
        return _AdoptedWork(torch.zeros(view.numel, device=view.device), 0, 0)
    frozen = part["snapshot"]
    step, tokens = part["base_step"], part["base_tokens"]
    base = view.cast(saved.committed[index].tensors["anchor"].to(view.device))
    if (
        frozen is not None
        and newest.record.counted_step(*saved.held.incarnation_id) >= frozen["contribution"]["last_step"]
    ):
        step, tokens, base = frozen["contribution"]["last_step"], frozen["tokens"], frozen["params"].to(view.device)
    return _AdoptedWork(part["params"].to(view.device) - base, own["local_steps"] - step, own["tokens"] - tokens)


def adopt(
    outer: OuterStep, saved: SavedReplica, adopted: Sequence[SavedReplica], newest: Sequence[CommittedVersion]
) -> None:
    """Moves a restored replica onto the newest versions, with its own pending work and that of ``adopted``.

    Nothing stays frozen: nobody who knew of a contribution under way lives. The counters go on so far that every
    fragment finds room for its steps between what was counted and now.
    """
    works = [
        [_work(fragment.view, each, fragment.index, newest[fragment.index]) for each in (saved, *adopted)]
        for fragment in outer.fragments
    ]
    outer.local_steps += max(sum(work.steps for work in others) for _, *others in works)
    outer.tokens += max(sum(work.tokens for work in others) for _, *others in works)
    for fragment, found in zip(outer.fragments, works, strict=True):
        view, trained = fragment.view, slice(0, fragment.view.trained)
        state = outer.place(state_of(fragment, newest[fragment.index], saved.held, newest[0].record))
        if state.meta.version != fragment.state.meta.version:
            fragment.trigger_metrics.direction = None
        fragment.state = fragment.taken = fragment.applied = state
        fragment.start = fragment.base = view.cast(state.anchor)
        fragment.snapshot = None
        moved = fragment.start + found[0].delta
        for work in found[1:]:
            moved[trained] += work.delta[trained]
        view.write(moved)
        fragment.base_step = outer.local_steps - sum(work.steps for work in found)
        fragment.base_tokens = outer.tokens - sum(work.tokens for work in found)
        for each in adopted:
            add_residuals(fragment, each.own["fragments"][fragment.index]["residuals"])
        outer.restart_trigger(fragment, anew=True)


def add_residuals(fragment: Fragment, left: Tree) -> None:
    """Error feedback: what was left out of others' payloads is pending work, too. What they owed of sums is given up,
    as always when another member answers for a span."""
    residuals = dict(fragment.residuals)
    for units, saved in left.items():
        more, mine = residual_of(fragment.view, saved), residuals.get(units)
        if more.own is None:
            continue
        owed = mine.owed if mine is not None else (0, more.own.new_empty(0))
        own = more.own if mine is None or mine.own is None else mine.own + more.own
        residuals[units] = Residual(own, owed)
    fragment.residuals = residuals


def state_of(fragment: Fragment, version: CommittedVersion, held: Held, first: Record) -> State:
    """The version as this replica holds it. ValueError: it does not fit the model, or is damaged."""
    record = version.record
    meta = Committed(
        record.fragment, record.version, first.inner_step, record.counted_step(*held.incarnation_id), record
    )  # fmt: skip
    return replace(check_fetched(fragment.state, meta, version.digest, version.tensors), fetched=False)


def on(view: FlatView, tensor: Tensor | None) -> Tensor | None:
    """A copy on the device of ``view``."""
    return None if tensor is None else tensor.to(view.device, copy=True)


def residual_of(view: FlatView, saved: Tree) -> Residual:
    """A residual out of a checkpoint."""
    return Residual(on(view, saved["own"]), (saved["first"], saved["owed"].to(view.device, copy=True)))
