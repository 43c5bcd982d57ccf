"""Step 6, apply: the parameters follow a newer committed state, between two inner steps and nowhere else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ftopt.optimizer.outer.fragment import Fragment
from ftopt.optimizer.outer.rebase import Rebase, mix_
from ftopt.optimizer.outer.schedule import SyncSchedule
from ftopt.optimizer.outer.shared import Shared
from ftopt.optimizer.outer.state import CommittedState, repaired
from ftopt.optimizer.tensors.digest import damage
from ftopt.streams import used_here

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Move:
    """A move of the parameters with its book-keeping: all of it is done, and each part once.

    User code may catch an exception that comes in the middle, and go on: the rest is then done before anything else. A
    task that was broken off is begun again. So each starts from what the move began with, goes on where it was, or is
    one assignment.

    Args:
        dropped: pending steps that are dropped with it, and why.
        done: so many tasks are.
    """

    tasks: list[Callable[[], object]]
    dropped: int = 0
    reason: str = ""
    done: int = 0


class Applier:
    """Applies committed states, and drops pending steps. Training thread.

    Attributes:
        moves: under way: an exception has come in between.
    """

    def __init__(self, shared: Shared, schedule: SyncSchedule) -> None:
        self.moves: dict[Fragment, Move] = {}
        self._shared, self._group, self._schedule = shared, shared.group, schedule

    def apply(self, fragment: Fragment, *, early: bool = False) -> bool:
        """Applies newer committed states; one that counts this replica's snapshot ``tau`` steps after that, or early.
        Then drops pending steps that are condemned. False when there is none, or one that has to wait."""
        if self.moves:
            self.go_on()
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
        if self._repair(fragment):
            fragment.pardon(dropped=False)
            return True
        _log.warning(
            "replica %s: %d steps dropped: %s; the parameters are back at the anchor, and the inner state is reset; "
            "broken memory, a bad batch or too large a rate does this",
            self._group.replica,
            fragment.pending_steps,
            reason,
        )
        after: list[Callable[[], object]] = [partial(fragment.pardon, dropped=True)]
        if self._group.units is not None and not fragment.index:
            after.append(partial(self._group.units.redo, once=True))
        self.drop(fragment, fragment.start, "outlier", after)
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

    def go_on(self) -> None:
        """Does the rest of the moves in which an exception came."""
        for fragment, move in list(self.moves.items()):
            self._go_on(fragment, move)

    def _run(self, fragment: Fragment, move: Move) -> None:
        assert fragment not in self.moves, "two moves of the same parameters"
        self.moves[fragment] = move
        try:
            self._go_on(fragment, move)
        except BaseException:
            self._go_on(fragment, move)  # if it can be: user code may read the parameters next
            raise

    def _go_on(self, fragment: Fragment, move: Move) -> None:
        while move.done < len(move.tasks):
            move.done += (move.tasks[move.done](), 1)[1]  # at once: a task that has been done is not begun again
        self.moves.pop(fragment, None)

    def _apply_newest(self, fragment: Fragment, tau: int, early: bool) -> bool:
        state, base, reset = fragment.to_apply()
        used_here([base.params, *state.tensors().values()])
        counted = base.params is not fragment.start
        since = self._shared.counters.local_steps - fragment.snapshot_step
        if counted and not state.fetched and not early and since < tau:
            return False
        before, version, view = fragment.applied, state.meta.version, fragment.view
        self._group.emit("apply", fragment=fragment.index, version=version, inner_step=self._shared.inner_step())
        if state.made is not None and state.made.size == 1 and state is not before:
            state = self._checked(fragment, state, base.params)
        start = self._shared.committed_memory.place(view.cast(state.anchor))
        # What else a peer's model replaces is older than that.
        others = self._shared.fragments[fragment.index + 1 :] if state.live is not None else []
        for other in others:
            self.apply(other, early=True)
        mixes = counted and since == fragment.overlap.delay and not self._schedule.averages(fragment)
        alpha = fragment.overlap.mix if mixes else None
        pending = fragment.pending_steps
        move, tasks = Move([]), list[Callable[[], object]]()
        if fragment.by_job and (state.fetched or not counted):
            # All replicas have taken these steps alike: the anchor has them already, and what it lacks comes, with
            # the model, from a peer (`GradientFragment.follow`).
            move.dropped, move.reason = pending if reset else 0, "reset"
        elif not pending and (alpha is None or since):
            tasks.append(partial(view.write, start))
        elif reset or (not fragment.carries_over and version != before.meta.version):
            move.dropped, move.reason = pending, "reset" if reset else "taken_over"
            tasks.append(partial(view.write, start))
        elif alpha is not None:
            mixed = mix_(view.read(self._shared.memory.like(start)), start, alpha)
            move.dropped, move.reason = math.ceil((1 - alpha) * pending), "mixed"
            tasks.append(partial(view.write, mixed))
        elif counted or version != before.meta.version:
            unknown = self._damaged(fragment, base.params) if state.fetched else []
            tasks.append(partial(self._rebase, fragment, move, Rebase(view, base.params, start, unknown), start))
        # else: a sound copy of what was damaged here. The work is what the parameters differ from it.
        tasks.append(partial(fragment.follow, state))
        versions = version - before.meta.version
        tasks.append(lambda: fragment.trigger_metrics.moved(before.anchor, state.anchor, versions))
        tasks.append(lambda: fragment.apply(state, start, nothing_pending=not pending, dropped=move.dropped))
        for (
            other
        ) in others:  # a peer's parameters have replaced this replica's own work on them, but for what is offered
            _, lost = other.since_frozen()
            tasks += [partial(other.discard, lost), partial(self._tell, other, lost, "replaced")]
        if reset and self._group.units is not None and not fragment.index:
            tasks.append(self._group.units.redo)
        if counted:
            tasks.append(self._shared.counters.count_applied_round)
        else:
            tasks.append(partial(self._schedule.restart, fragment, anew=True))
        tasks.append(lambda: self._tell(fragment, move.dropped, move.reason))
        move.tasks = tasks
        self._run(fragment, move)
        return True

    def _rebase(self, fragment: Fragment, move: Move, rebase: Rebase, start: Tensor) -> None:
        if not rebase.go_on():
            move.dropped, move.reason = fragment.pending_steps, "nonfinite"
            fragment.view.write(start)

    def drop(self, fragment: Fragment, start: Tensor, reason: str, after: Sequence[Callable[[], object]] = ()) -> None:
        """Drops the pending steps: the parameters go back to ``start``. ``after``: what is to be done then."""
        steps = fragment.pending_steps
        dropped, told = partial(fragment.discard, steps), partial(self._tell, fragment, steps, reason)
        self._run(fragment, Move([partial(fragment.view.write, start), dropped, told, *after]))

    def drop_loaded(self, fragment: Fragment) -> int:
        """Drops the steps that no outstanding contribution holds, since user code has replaced the parameters: they go
        back to where these steps began. Returns how many."""
        began, steps = fragment.since_frozen()
        params = began if isinstance(began, Tensor) else began.flat()
        tasks: list[Callable[[], object]] = []
        if params.numel():  # else they were frozen in place: nothing is pending, and the next state replaces them
            tasks.append(partial(fragment.view.write, params))
        tasks += [partial(fragment.discard, steps), partial(self._tell, fragment, steps, "loaded")]
        self._run(fragment, Move(tasks))
        return steps

    def _tell(self, fragment: Fragment, steps: int, reason: str) -> None:
        """Counts steps that have been dropped, if there are any, and tells of them."""
        if reason == "nonfinite":
            again = not fragment.count_nonfinite()
            self._count_nonfinite(fragment, steps, again=again)
        else:
            again = reason == "outlier" and fragment.keeps_still
        if again:
            self._shared.counters.count_inner_reset()
        if steps and reason == "reset":
            _log.warning(
                "replica %s: %d steps dropped%s: it was given up meanwhile, and goes on from the job's state",
                self._group.replica,
                steps,
                f" of fragment {fragment.index}" if len(self._shared.fragments) > 1 else "",
            )
        if steps:
            data = {"steps": steps, "reason": reason}
            self._group.emit("discarded", fragment=fragment.index, inner_step=self._shared.inner_step(), data=data)

    def _count_nonfinite(self, fragment: Fragment, steps: int, *, again: bool) -> None:
        counters = self._shared.counters
        counters.count_nonfinite_drop()
        times = counters.nonfinite_drops
        if not times & (times - 1):  # the first time, the second, the fourth, ...
            _log.warning(
                "replica %s: %d steps dropped (occasion %d): NaN or Inf in its parameters or gradients; look at its "
                "loss, rate and data",
                self._group.replica,
                steps,
                times,
            )
        if again and not fragment.keeps_still:  # so is the model that they are of, which the last average replaces
            for other in (other for other in self._shared.fragments if other.by_job):
                self.drop(other, other.start, "replaced")

    def _damaged(self, fragment: Fragment, base: Tensor) -> list[slice]:
        """Where ``base`` is damaged, so that the pending work is unknown."""
        applied = fragment.applied
        found = damage(base, applied.sums["anchor"]) if base is applied.anchor else []
        if found:
            data = {"blocks": len(found)}
            self._group.emit("repaired", fragment=fragment.index, version=applied.meta.version, data=data)
        return found
