"""Step 6, apply: the parameters follow a newer committed state, between two inner steps and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ftopt.optimizer.outer.fragment import Fragment
from ftopt.optimizer.outer.merge import mixed, rebase_
from ftopt.optimizer.outer.schedule import SyncSchedule
from ftopt.optimizer.outer.shared import Shared
from ftopt.optimizer.tensors.digest import damage
from ftopt.streams import used_here


class Applier:
    """Applies committed states, and drops pending steps. Training thread."""

    def __init__(self, shared: Shared, schedule: SyncSchedule) -> None:
        self._shared = shared
        self._group = shared.group
        self._schedule = schedule

    def apply(self, fragment: Fragment, *, early: bool = False) -> bool:
        """Applies newer committed states; one that counts this replica's snapshot ``tau`` steps after that, or early.

        Returns:
            False when there is none, or one that has to wait.
        """
        if fragment.state is fragment.applied:
            return False
        tau = self._schedule.tau(fragment)
        while fragment.state is not fragment.applied:
            if not self._apply_newest(fragment, tau, early):
                return False
        self._shared.committed_memory.release()
        return True

    def _apply_newest(self, fragment: Fragment, tau: int, early: bool) -> bool:
        state, base, reset = fragment.to_apply()
        used_here([base.params, *state.tensors().values()])
        counted = base.params is not fragment.start
        since = self._shared.counters.local_steps - fragment.snapshot_step
        if counted and not state.fetched and not early and since < tau:
            return False
        before, version = fragment.applied, state.meta.version
        self._group.emit("apply", fragment=fragment.index, version=version, inner_step=self._shared.inner_step())
        start = self._shared.committed_memory.place(fragment.view.cast(state.anchor))
        alpha = fragment.overlap.mix if counted and tau and since == tau else None
        nothing_pending = not fragment.pending_steps
        if nothing_pending:
            fragment.view.write(start)
        elif reset or (not fragment.carries_over and version != before.meta.version):
            self.drop(fragment, start, "reset" if reset else "taken_over")
        elif alpha is not None:
            self._mix(fragment, start, alpha)
        elif counted or version != before.meta.version:
            self._rebase(fragment, base.params, start, self._unknown(fragment, base.params) if state.fetched else [])
        # else: a sound copy of what was damaged here. The work is what the parameters differ from it.
        if reset and self._group.units is not None and not fragment.index:
            self._group.units.redo()
        fragment.trigger_metrics.moved(before.anchor, state.anchor, version - before.meta.version)
        fragment.follow(state)
        fragment.apply(state, start, nothing_pending=nothing_pending)
        if counted:
            self._shared.counters.count_applied_round()
        else:
            self._schedule.restart(fragment, anew=True)
        return True

    def drop(self, fragment: Fragment, start: Tensor, reason: str) -> None:
        """Gives the pending steps up: the parameters go back to ``start``."""
        if reason == "nonfinite":
            self._shared.counters.count_nonfinite_drop()
        fragment.view.write(start)
        self._discard(fragment, fragment.pending_steps, reason)

    def _unknown(self, fragment: Fragment, base: Tensor) -> list[slice]:
        """Where ``base`` is damaged: how the parameters differ from it says nothing there."""
        applied = fragment.applied
        found = damage(base, applied.sums["anchor"]) if base is applied.anchor else []
        if found:
            data = {"blocks": len(found)}
            self._group.emit("repaired", fragment=fragment.index, version=applied.meta.version, data=data)
        return found

    def _rebase(self, fragment: Fragment, base: Tensor, start: Tensor, unknown: Sequence[slice]) -> None:
        """Moves the pending work onto the new anchor; drops it if that is not finite."""
        if not rebase_(fragment.view, base, start, unknown):
            self.drop(fragment, start, "nonfinite")

    def _mix(self, fragment: Fragment, start: Tensor, alpha: float) -> None:
        """Mixes; a share ``1 - alpha`` of the pending work is gone."""
        fragment.view.write(mixed(fragment.view, start, alpha, out=self._shared.memory.like(start)))
        self._discard(fragment, math.ceil((1 - alpha) * fragment.pending_steps), "mixed")

    def _discard(self, fragment: Fragment, steps: int, reason: str) -> None:
        """Counts the oldest ``steps`` pending steps as discarded."""
        if not steps:
            return
        fragment.discard(steps)
        data = {"steps": steps, "reason": reason}
        self._group.emit("discarded", fragment=fragment.index, inner_step=fragment.inner_step(), data=data)
