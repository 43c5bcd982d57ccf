"""Step 6, apply: the parameters follow a newer committed state, between two inner steps and nowhere else."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ftopt.optimizer.outer.fragment import Fragment
from ftopt.optimizer.outer.schedule import SyncSchedule
from ftopt.optimizer.outer.shared import Shared
from ftopt.optimizer.outer.state import CommittedState, repaired
from ftopt.optimizer.tensors.buffers import keep_possible
from ftopt.optimizer.tensors.digest import damage
from ftopt.optimizer.tensors.flat import FlatView
from ftopt.optimizer.tensors.mapped import behind
from ftopt.optimizer.tensors.pieces import piece_of
from ftopt.streams import used_here

_log = logging.getLogger(__name__)


class Applier:
    """Applies committed states, and drops pending steps. Training thread."""

    def __init__(self, shared: Shared, schedule: SyncSchedule) -> None:
        self._shared, self._group, self._schedule = shared, shared.group, schedule

    def apply(self, fragment: Fragment, *, early: bool = False) -> bool:
        """Applies newer committed states; one that counts this replica's snapshot ``tau`` steps after that, or early.
        Then drops pending steps that are condemned. False when there is none, or one that has to wait."""
        if fragment.state is fragment.applied:
            return self._drop_condemned(fragment)
        tau = self._schedule.tau(fragment)
        while fragment.state is not fragment.applied:
            if not self._apply_newest(fragment, tau, early):
                return False
        self._shared.committed_memory.release()
        self._drop_condemned(fragment)
        return True

    def _drop_condemned(self, fragment: Fragment) -> bool:
        """Drops pending steps that were out of line for the second time: the parameters go back to the anchor. If that
        is damaged itself, it is repaired instead. False: nothing is condemned."""
        reason = fragment.condemned
        if not reason or self._group.outstanding(fragment.index):
            return False
        repaired = self._repair(fragment)
        if not repaired:
            _log.warning(
                "replica %s: %d steps dropped: %s; the parameters are back at the anchor, and the inner state is "
                "reset; "
                "broken memory, a bad batch or too large a rate does this",
                self._group.replica,
                fragment.pending_steps,
                reason,
            )
            self.drop(fragment, fragment.start, "outlier")
            if self._group.units is not None and not fragment.index:
                self._group.units.redo(once=True)
        fragment.pardon(dropped=not repaired)
        return True

    def _repair(self, fragment: Fragment) -> bool:
        """Makes a damaged state sound that cannot be fetched, since nobody else holds it: where the anchor is damaged,
        nothing is pending any more, and damaged outer state is zero. False: it is sound."""
        state = fragment.applied
        blocks = state.damage()
        if not blocks:
            return False
        version = state.meta.version
        self._group.emit("damaged", fragment=fragment.index, version=version, data={"blocks": blocks[:8]})
        fragment.repair(repaired(state, fragment.view.read(fragment.view.empty())))
        self._group.emit("repaired", fragment=fragment.index, version=version, data={"blocks": len(blocks)})
        return True

    def _checked(self, fragment: Fragment, state: CommittedState, base: Tensor) -> CommittedState:
        """A newer state that this replica alone has made, before the parameters follow it: a bit that has flipped in it
        since would be in everything there is."""
        blocks = state.damage()
        if not blocks:
            return state
        params = base if base.numel() else fragment.view.read(fragment.view.empty())
        sound = repaired(state, params)
        self._group.emit("damaged", fragment=fragment.index, version=state.meta.version, data={"blocks": blocks[:8]})
        if not fragment.replace_newest(state, sound):
            return state
        self._group.emit("repaired", fragment=fragment.index, version=state.meta.version, data={"blocks": len(blocks)})
        return sound

    def _apply_newest(self, fragment: Fragment, tau: int, early: bool) -> bool:
        state, base, reset = fragment.to_apply()
        used_here([base.params, *state.tensors().values()])
        counted = base.params is not fragment.start
        since = self._shared.counters.local_steps - fragment.snapshot_step
        if counted and not state.fetched and not early and since < tau:
            return False
        before, version = fragment.applied, state.meta.version
        self._group.emit("apply", fragment=fragment.index, version=version, inner_step=self._shared.inner_step())
        if state.made is not None and state.made.size == 1 and state is not before:
            state = self._checked(fragment, state, base.params)
        start = self._shared.committed_memory.place(fragment.view.cast(state.anchor))
        if state.live is not None:
            for other in self._shared.fragments[fragment.index + 1 :]:  # what they hold is older than that model
                self.apply(other, early=True)
        mixes = counted and since == fragment.overlap.delay and not self._schedule.averages(fragment)
        alpha = fragment.overlap.mix if mixes else None
        nothing_pending = not fragment.pending_steps
        try:
            if fragment.by_job and (state.fetched or not counted):
                # All replicas have taken these steps alike: the anchor has them already, and what it lacks comes, with
                # the model, from a peer (`GradientFragment.follow`).
                self._discard(fragment, fragment.pending_steps if reset else 0, "reset")
            elif nothing_pending and (alpha is None or since):
                fragment.view.write(start)
            elif reset or (not fragment.carries_over and version != before.meta.version):
                self.drop(fragment, start, "reset" if reset else "taken_over")
            elif alpha is not None:
                now = fragment.view.read(self._shared.memory.like(start))
                fragment.view.write(mix_(now, start, alpha))
                self._discard(fragment, math.ceil((1 - alpha) * fragment.pending_steps), "mixed")
            elif counted or version != before.meta.version:
                unknown = self._damaged(fragment, base.params) if state.fetched else []
                if not rebase_(fragment.view, base.params, start, unknown):
                    self.drop(fragment, start, "nonfinite")
            # else: a sound copy of what was damaged here. The work is what the parameters differ from it.
            if reset and self._group.units is not None and not fragment.index:
                self._group.units.redo()
            fragment.trigger_metrics.moved(before.anchor, state.anchor, version - before.meta.version)
            fragment.follow(state)
            if state.live is not None:  # a peer's parameters have replaced this replica's own work on them
                for other in self._shared.fragments[fragment.index + 1 :]:
                    self._discard(other, other.pending_steps, "replaced")
            fragment.apply(state, start, nothing_pending=nothing_pending)
        except BaseException:
            if fragment.applied is not state:
                self._step_back(fragment)
            raise
        if counted:
            self._shared.counters.count_applied_round()
        else:
            self._schedule.restart(fragment, anew=True)
        return True

    def drop(self, fragment: Fragment, start: Tensor, reason: str) -> None:
        """Drops the pending steps: the parameters go back to ``start``."""
        again = reason == "outlier" and fragment.keeps_still
        if reason == "nonfinite":
            again = not fragment.count_nonfinite()
            self._count_nonfinite(fragment, again=again)
        if again:
            self._shared.counters.count_inner_reset()
        fragment.view.write(start)
        self._discard(fragment, fragment.pending_steps, reason)

    def drop_loaded(self, fragment: Fragment) -> int:
        """Drops the steps that no outstanding contribution holds, since user code has replaced the parameters: they go
        back to where these steps began. Returns how many."""
        began, steps = fragment.since_frozen()
        params = began if isinstance(began, Tensor) else began.flat()
        if params.numel():  # else they were frozen in place: nothing is pending, and the next state replaces them
            fragment.view.write(params)
        self._discard(fragment, steps, "loaded")
        return steps

    def _count_nonfinite(self, fragment: Fragment, *, again: bool) -> None:
        counters = self._shared.counters
        counters.count_nonfinite_drop()
        times = counters.nonfinite_drops
        if not times & (times - 1):  # the first time, the second, the fourth, ...
            _log.warning(
                "replica %s: %d steps dropped (occasion %d): NaN or Inf in its parameters or gradients; look at its "
                "loss, rate and data",
                self._group.replica,
                fragment.pending_steps,
                times,
            )
        if again and not fragment.keeps_still:  # so is the model that they are of, which the last average replaces
            for other in (other for other in self._shared.fragments if other.by_job):
                self.drop(other, other.start, "replaced")

    def _step_back(self, fragment: Fragment) -> None:
        """An exception came in between: the parameters may be on the way from one anchor to the next, which must not be
        taken for work when the state is applied after all. They go back to where the pending work began."""
        base = fragment.base.params
        if base.numel():  # else they were frozen in place: nothing is pending, and `Freezer.join` applies the state
            self.drop(fragment, base, "interrupted")

    def _damaged(self, fragment: Fragment, base: Tensor) -> list[slice]:
        """Where ``base`` is damaged, so that the pending work is unknown."""
        applied = fragment.applied
        found = damage(base, applied.sums["anchor"]) if base is applied.anchor else []
        if found:
            data = {"blocks": len(found)}
            self._group.emit("repaired", fragment=fragment.index, version=applied.meta.version, data=data)
        return found

    def _discard(self, fragment: Fragment, steps: int, reason: str) -> None:
        """Counts the oldest ``steps`` pending steps as discarded."""
        if steps:
            fragment.discard(steps)
            data = {"steps": steps, "reason": reason}
            self._group.emit("discarded", fragment=fragment.index, inner_step=self._shared.inner_step(), data=data)


def mix_(now: Tensor, start: Tensor, alpha: float) -> Tensor:
    """``now <- alpha * now + (1 - alpha) * start``, as in Streaming DiLoCo (arXiv 2501.18512); ``now``. Written so that
    what nobody has moved stays as it is, and alpha 0 and 1 are exactly ``start`` and ``now``."""
    if alpha < 0.5:
        return now.sub_(start).mul_(alpha).add_(start)
    return now.sub_(torch.sub(now, start).mul_(1 - alpha))


@torch.no_grad()
def rebase_(view: FlatView, base: Tensor, start: Tensor, unknown: Sequence[slice]) -> bool:
    """``params <- cast(new anchor) + (params - base)``: the pending work on the new anchor. One sweep. False: something
    was not finite, and the parameters are void.

    With the cast, ``params - start`` is the work again, without what the parameters' dtype rounds off the anchor.

    Args:
        base: what the pending work is measured from, flat fp32.
        start: the new anchor, rounded to the parameters' dtypes, flat fp32.
        unknown: where ``base`` is damaged: there the parameters become the anchor's.
    """
    if unknown:
        now, base = view.read(view.empty()), base.clone()
        for block in unknown:
            base[block] = now[block]
    size = piece_of(start)
    scratch, sums = start.new_empty(min(size, start.numel())), list[Tensor]()
    for part, where in behind(view.parts(size), base, start):
        before, after = base[where].view(part.shape), start[where].view(part.shape)
        if part.dtype == torch.float32 and where.start < view.trained:
            sums.append(part.sub_(before).add_(after).sum())
            continue
        room = scratch[: part.numel()].view(part.shape) if part.numel() <= scratch.numel() else torch.empty_like(after)
        moved = torch.sub(part, before, out=room).add_(after)
        if where.start >= view.trained:
            keep_possible(view.name_at(where.start), moved, part, after)
        sums.append(moved.sum())
        part.copy_(moved)
    if bool(torch.isfinite(torch.stack(sums)).all()):  # then so are their terms
        return True
    return all(bool(torch.isfinite(part).all()) for part, _ in view.parts(size))
