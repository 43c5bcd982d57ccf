"""Adopting pending work of replicas that do not return, and of a former incarnation.

Work is added to the committed state as by a rebase, and goes into the next contribution. The counters advance far
enough that every fragment has room for its steps after the counted ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ftopt.common.tree import Tree
from ftopt.optimizer.saved.capture import CommittedVersion, SavedReplica
from ftopt.step.outer.error_feedback import Residual
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.state import CommittedState, Pending, check_fetched
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import FlatView
from ftopt.sync.group import Committed, Held, Record


@dataclass(frozen=True)
class PendingWork:
    """Pending work of one replica on one fragment.

    Args:
        params: its parameters, flat; None: nothing is pending.
        base: the parameters from which the work is measured.
        steps, tokens: inner steps in it, and their tokens.
        residuals: what a codec has left out of its payloads.
    """

    params: Tensor | None = None
    base: Tensor | None = None
    steps: int = 0
    tokens: int = 0
    residuals: Tree | None = None


def work_of(view: FlatView, own: Tree, index: int, base: Tensor | None, counted_step: int = 0) -> PendingWork:
    """A captured replica's work on a fragment that a version does not count.

    Args:
        own: the replica's captured state.
        base: the base of its work, unless the version counts its frozen contribution.
        counted_step: that replica's last inner step in the version.
    """
    part = own["fragments"][index]
    if part is None or part["params"] is None or base is None:
        return PendingWork(residuals=part and part["residuals"])
    step, tokens, frozen = part["base_step"], part["base_tokens"], part.get("snapshot")
    if frozen is not None and counted_step >= frozen["contribution"]["last_step"]:
        step, tokens, base = frozen["until"], frozen["tokens"], frozen["params"]
    params, base = part["params"].to(view.device), base.to(view.device)
    return PendingWork(params, base, own["local_steps"] - step, own["tokens"] - tokens, part["residuals"])


def adopt_works(outer: OuterStep, works: Sequence[Sequence[PendingWork]], *, own: int) -> None:
    """Adds works to the committed state.

    Args:
        outer: of a replica whose fragments stand on that state, with nothing frozen.
        works: of each fragment.
        own: number of each fragment's works that are this replica's own, and in its counters and residuals already.
    """
    others = [found[own:] for found in works]
    counters, totals = outer.counters, [_totals(found) for found in others]
    counters.adopt(max(steps for steps, _ in totals), max(tokens for _, tokens in totals))
    for fragment, found in zip(outer.fragments, works, strict=True):
        fragment.view.write(_moved(fragment, found))
        steps, tokens = _totals(found)
        base = replace(fragment.base, step=counters.local_steps - steps, tokens=counters.tokens - tokens)
        residuals = fragment.residuals
        for work in found[own:]:
            residuals = _with(residuals, fragment.view, work.residuals or {})
        fragment.restore(Pending(base, None, residuals))


def _totals(works: Sequence[PendingWork]) -> tuple[int, int]:
    """The total steps and tokens of the works."""
    return sum(work.steps for work in works), sum(work.tokens for work in works)


def _moved(fragment: Fragment, works: Sequence[PendingWork]) -> Tensor:
    """The parameters with all works added; buffers are the first replica's."""
    start, carried = fragment.start, fragment.view.carried
    moved = start.clone()
    for number, work in enumerate(works):
        if work.params is None or work.base is None:
            continue
        if fragment.by_job:  # all have taken the same steps, so the work of one is that of all
            return work.params.clone()
        if number:
            moved[carried] += (work.params - work.base)[carried]
        else:  # start + (params - start) would be rounded
            moved = work.params.clone() if torch.equal(work.base, start) else start + (work.params - work.base)
    return moved


def adopt(
    outer: OuterStep, saved: SavedReplica, adopted: Sequence[SavedReplica], newest: Sequence[CommittedVersion]
) -> None:
    """Moves a restored replica onto the newest versions, with its own pending work and that of ``adopted``.

    Nothing stays frozen, since no living replica knows of a contribution under way.
    """
    works = []
    for fragment, version in zip(outer.fragments, newest, strict=True):
        works.append([_saved_work(fragment.view, each, version) for each in (saved, *adopted)])
        state = state_of(fragment, version, saved.held, newest[0].record).placed(outer.shared.committed_memory)
        if state.meta.version != fragment.state.meta.version:
            fragment.trigger_metrics.direction = None
        fragment.stand_on(state)
    adopt_works(outer, works, own=1)
    for fragment in outer.fragments:
        outer.schedule.restart(fragment, anew=True)


def _saved_work(view: FlatView, saved: SavedReplica, newest: CommittedVersion) -> PendingWork:
    index = newest.record.fragment
    base = view.cast(saved.committed[index].tensors["anchor"].to(view.device))
    return work_of(view, saved.own, index, base, newest.record.counted_step(*saved.held.incarnation_id))


def _with(residuals: Mapping[str, Residual], view: FlatView, left: Tree) -> dict[str, Residual]:
    """Adds the codec's errors in others' payloads, which are pending work, too. Their debts of sums are dropped, as
    always when another member has to send a span."""
    found = dict(residuals)
    for units, saved in left.items():
        more, here = residual_of(view, saved), found.get(units)
        if more.own is None:
            continue
        own = more.own if here is None or here.own is None else here.own + more.own
        found[units] = Residual(own, here.owed if here is not None else (0, more.own.new_empty(0)))
    return found


def state_of(fragment: Fragment, version: CommittedVersion, held: Held, first: Record) -> CommittedState:
    """The version as this replica holds it. ValueError: it does not fit the model, or is damaged."""
    record = version.record
    counted_step = record.counted_step(*held.incarnation_id)
    meta = Committed(record.fragment, record.version, first.inner_step, counted_step, record)
    return replace(check_fetched(fragment.state, meta, version.digest, version.tensors, fragment.view), fetched=False)


def on(view: FlatView, tensor: Tensor | None) -> Tensor | None:
    """A copy on the device of ``view``."""
    return None if tensor is None else tensor.to(view.device, copy=True)


def residual_of(view: FlatView, saved: Tree) -> Residual:
    """A captured residual."""
    return Residual(on(view, saved["own"]), (saved["first"], saved["owed"].to(view.device, copy=True)))
