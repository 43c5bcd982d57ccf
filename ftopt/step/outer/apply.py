"""Step 6, apply: the parameters follow a newer committed state, only between two inner steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ftopt.common.plural import count
from ftopt.common.streams import used_here
from ftopt.events import was_told
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.rebase import Rebase
from ftopt.step.outer.schedule import SyncSchedule
from ftopt.step.outer.shared import Shared
from ftopt.step.outer.state import CommittedState, damaged_slices, repaired
from ftopt.step.tensors.digest import damage

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Move:
    """A move of the parameters with its book-keeping, of which each part is done exactly once.

    If an exception interrupts a move and user code catches it, the rest is done before anything else. An interrupted
    task is begun again, so each task starts from the move's initial values, resumes where it was, or is one assignment.

    Events are emitted after all tasks, each once: an `on_event` may raise, and the events that it receives are in
    effect.

    Args:
        news: the events to emit afterwards.
        dropped: pending steps that the move drops; ``reason``: why.
        done: the number of tasks done.
    """

    tasks: list[Callable[[], object]]
    news: list[Callable[[], object]] = field(default_factory=list)
    dropped: int = 0
    reason: str = ""
    done: int = 0


class Applier:
    """Applies committed states, and drops pending steps. Training thread.

    Attributes:
        moves: moves under way, which an exception has interrupted.
    """

    def __init__(self, shared: Shared, schedule: SyncSchedule) -> None:
        self.moves: dict[Fragment, Move] = {}
        self._shared, self._group, self._schedule = shared, shared.group, schedule
        self._unused = 0  # shares of global batches that were not finite

    def apply(self, fragment: Fragment, *, early: bool = False) -> bool:
        """Applies newer committed states; a state that counts this replica's snapshot is applied ``tau`` steps after
        the snapshot, or at once with ``early``. Then drops condemned pending steps. False if there is no newer state,
        or it has to wait."""
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
        """Drops pending steps that were out of line for the second time: the parameters return to the anchor. If the
        anchor itself is damaged, it is repaired instead. False: nothing is condemned."""
        reason = fragment.condemned
        if not reason or self._group.outstanding(fragment.index):
            return False
        if self._repair(fragment):
            return True
        _log.warning(
            "replica %s: %s dropped: %s; the parameters are back at the anchor, inner step %d, and the inner state is "
            "reset; broken memory, a bad batch or too large a rate does this; inner_step repeats numbers, "
            "passed(every=...) does not",
            self._group.replica,
            count(fragment.pending_steps, "step"),
            reason,
            self._shared.inner_step() - (0 if fragment.index else fragment.pending_steps),
        )
        after: list[Callable[[], object]] = [partial(fragment.pardon, dropped=True)]
        if self._group.units is not None and not fragment.index:
            after.append(partial(self._group.units.redo, once=True))
        self.drop(fragment, fragment.start, "outlier", after)
        return True

    def _repair(self, fragment: Fragment) -> bool:
        """Repairs a damaged state that no other replica holds: damaged parts of the anchor take the parameters' values,
        so that nothing is pending there, and damaged outer state becomes zero. False: the state is sound."""
        state = fragment.applied
        blocks = self._damage(fragment, state)
        if not blocks:
            return False
        sound = repaired(state, fragment.view.read(fragment.view.empty()))
        tasks: list[Callable[[], object]] = [partial(fragment.repair, sound), partial(fragment.pardon, dropped=False)]
        self._run(fragment, Move(tasks, self._repairs(state, blocks)))
        return True

    def _damage(self, fragment: Fragment, state: CommittedState) -> list[str]:
        """See `CommittedState.damage`. FtoptError: a rank's slice is damaged, and no other replica can repair it."""
        found: list[list[str]] = fragment.view.together(state.damage())
        if fragment.view.sliced and any(found):
            raise damaged_slices(found)
        return found[0]

    def _repairs(self, state: CommittedState, blocks: list[str]) -> list[Callable[[], object]]:
        emit = partial(self._group.emit, fragment=state.meta.fragment, version=state.meta.version)
        found, mended = {"blocks": blocks[:8]}, {"blocks": len(blocks)}
        return [partial(emit, "damaged", data=found), partial(emit, "repaired", data=mended)]

    def _checked(self, fragment: Fragment, state: CommittedState, base: Tensor) -> CommittedState:
        """Checks a newer state that this replica alone has made, before the parameters follow it: a bit flipped since
        then would spread to everything."""
        blocks = self._damage(fragment, state)
        if not blocks:
            return state
        params = base if base.numel() else fragment.view.read(fragment.view.empty())
        sound = repaired(state, params)
        damaged, mended = self._repairs(state, blocks)
        replaced = fragment.replace_newest(state, sound)
        self._run(fragment, Move([], [damaged, mended] if replaced else [damaged]))
        return sound if replaced else state

    def go_on(self) -> None:
        """Completes the moves that an exception has interrupted."""
        for fragment, move in list(self.moves.items()):
            self._go_on(fragment, move)

    def _run(self, fragment: Fragment, move: Move) -> None:
        assert fragment not in self.moves, "two moves of the same parameters"
        self.moves[fragment] = move
        try:
            self._go_on(fragment, move)
        except BaseException:
            self._go_on(fragment, move)  # if possible, since user code may read the parameters next
            raise

    def _go_on(self, fragment: Fragment, move: Move) -> None:
        while move.done < len(move.tasks):
            move.done += (move.tasks[move.done](), 1)[1]  # in one statement: no finished task is begun again
        while move.news:
            try:
                _ = move.news[0](), move.news.pop(0)  # in one statement: no event is emitted twice
            except BaseException as error:
                if was_told(error):
                    move.news.pop(0)
                raise
        self.moves.pop(fragment, None)
        move.tasks.clear()  # some refer to the move; the cycle would keep their tensors until Python collects it

    def _apply_newest(self, fragment: Fragment, tau: int, early: bool) -> bool:
        state, base, reset = fragment.to_apply()
        used_here([base.params, *state.tensors().values()])
        counted = base.params is not fragment.start
        since = self._shared.counters.local_steps - fragment.snapshot_step
        if counted and not state.fetched and not early and since < tau:
            return False
        before, version, view = fragment.applied, state.meta.version, fragment.view
        data = {"counted_step": state.meta.counted_step, "committed_step": state.meta.inner_step}
        inner_step = self._shared.inner_step()
        self._group.emit("apply", fragment=fragment.index, version=version, inner_step=inner_step, data=data)
        if state.made is not None and state.made.size == 1 and state is not before:
            state = self._checked(fragment, state, base.params)
        start = view.cast(state.anchor, self._shared.committed_memory)
        # First the other fragments that a peer's model replaces, whose newer states are older than that model.
        others = self._shared.fragments[fragment.index + 1 :] if state.live is not None else []
        for other in others:
            self.apply(other, early=True)
        mixes = counted and since == fragment.overlap.delay and not self._schedule.averages(fragment)
        alpha = fragment.overlap.mix if mixes else None
        pending = fragment.pending_steps
        move, tasks, news = Move([]), list[Callable[[], object]](), list[Callable[[], object]]()
        if fragment.by_job and (state.fetched or not counted):
            # All replicas have taken the same steps: the anchor contains them, and steps that it lacks come with a
            # peer's model (`GradientFragment.follow`).
            move.dropped, move.reason = pending if reset else 0, "reset"
        elif not pending and (alpha is None or since):
            tasks.append(partial(view.write, start))
        elif reset or (not fragment.carries_over and version != before.meta.version):
            move.dropped, move.reason = pending, "reset" if reset else "taken_over"
            tasks.append(partial(view.write, start))
        elif alpha is not None:
            move.dropped, move.reason = math.ceil((1 - alpha) * pending), "mixed"
            tasks.append(Rebase(view, start, start, alpha=alpha).go_on)
        elif counted or version != before.meta.version:
            unknown = self._damaged(fragment, base.params, news) if state.fetched else []
            tasks.append(partial(self._rebase, fragment, move, Rebase(view, base.params, start, unknown), start))
        # else: a sound copy of a state that was damaged here; the work is the parameters' difference from it.
        tasks.append(partial(fragment.follow, state))
        versions = version - before.meta.version
        tasks.append(lambda: fragment.trigger_metrics.moved(before.anchor, state.anchor, versions))
        tasks.append(lambda: fragment.apply(state, start, nothing_pending=not pending, dropped=move.dropped))
        for (
            other
        ) in others:  # a peer's parameters have replaced this replica's own work, except contributions under way
            _, lost = other.since_frozen()
            tasks.append(partial(other.discard, lost))
            news.append(partial(self._emit_discarded, other, lost, "replaced"))
        if reset and self._group.units is not None and not fragment.index:
            tasks.append(self._group.units.redo)
        if counted:
            tasks.append(self._shared.counters.count_applied_round)
        else:
            tasks.append(partial(self._schedule.restart, fragment, anew=True))
        tasks.append(lambda: self._book(fragment, move))
        tasks.append(lambda: self._note_unused(fragment, move))
        move.tasks, move.news = tasks, news
        self._run(fragment, move)
        return True

    def _rebase(self, fragment: Fragment, move: Move, rebase: Rebase, start: Tensor) -> None:
        if not all(fragment.view.together(rebase.go_on())):
            move.dropped, move.reason = fragment.pending_steps, "nonfinite"
            fragment.view.write(start)

    def drop(self, fragment: Fragment, start: Tensor, reason: str, after: Sequence[Callable[[], object]] = ()) -> None:
        """Drops the pending steps: the parameters return to ``start``. ``after``: tasks to do then."""
        move = Move([], dropped=fragment.pending_steps, reason=reason)
        move.tasks = [partial(fragment.view.write, start), partial(fragment.discard, move.dropped)]
        move.tasks += [partial(self._book, fragment, move), *after]
        self._run(fragment, move)

    def drop_since_frozen(self, fragment: Fragment, reason: str) -> int:
        """Drops the steps that no outstanding contribution holds: the parameters return to where these steps began.
        Returns their number."""
        began, steps = fragment.since_frozen()
        move = Move([], dropped=steps, reason=reason)
        params = began if isinstance(began, Tensor) else began.flat()
        if params.numel():  # else they were frozen in place: nothing is pending, and the next state replaces them
            move.tasks.append(partial(fragment.view.write, params))
        move.tasks += [partial(fragment.discard, steps), partial(self._book, fragment, move)]
        self._run(fragment, move)
        return steps

    def _book(self, fragment: Fragment, move: Move) -> None:
        """Counts the steps that the move drops, if any; their events come after it."""
        again = move.reason == "outlier" and fragment.keeps_still
        news = list[Callable[[], object]]()
        if move.reason == "nonfinite":
            again = not fragment.count_nonfinite()
            self._shared.counters.count_nonfinite_drop()
            news.append(partial(self._log_nonfinite, move.dropped, self._shared.counters.nonfinite_drops))
            if again and not fragment.keeps_still:  # the model is not finite either; the last average replaces it
                news.append(self._drop_models)  # separate moves, which complete themselves
        if again:
            self._shared.counters.count_inner_reset()
        move.news += [*news, partial(self._emit_discarded, fragment, move.dropped, move.reason)]

    def _note_unused(self, fragment: Fragment, move: Move) -> None:
        steps, reason = fragment.take_unused()
        if reason == "nonfinite":
            self._unused += 1
            move.news.append(partial(self._log_nonfinite, steps, self._unused))
        move.news.append(partial(self._emit_discarded, fragment, steps, reason))

    def _drop_models(self) -> None:
        """Drops the steps of parameters whose gradients are not finite. Proposed steps are being averaged already."""
        for other in (other for other in self._shared.fragments if other.by_job):
            if not self._group.outstanding(other.index):
                self.drop(other, other.start, "replaced")
            elif other.since_frozen()[1]:  # else they may be frozen in place
                self.drop_since_frozen(other, "replaced")

    def _emit_discarded(self, fragment: Fragment, steps: int, reason: str) -> None:
        """Reports dropped steps, if any."""
        if steps and reason == "reset":
            _log.warning(
                "replica %s: %s%s dropped: it starts again from the job's state",
                self._group.replica,
                count(steps, "pending step"),
                f" of fragment {fragment.index}" if len(self._shared.fragments) > 1 else "",
            )
        if steps:
            data = {"steps": steps, "reason": reason}
            self._group.emit("discarded", fragment=fragment.index, inner_step=self._shared.inner_step(), data=data)

    def _log_nonfinite(self, steps: int, times: int) -> None:
        if not times & (times - 1):  # the first time, the second, the fourth, ...
            _log.warning(
                "replica %s: %s dropped%s: NaN or Inf in its parameters or gradients; it is at inner step %d; look at "
                "its loss, rate and data",
                self._group.replica,
                count(steps, "step"),
                f", for the {times}th time" if times > 2 else ", again" if times > 1 else "",
                self._shared.inner_step(),
            )

    def _damaged(self, fragment: Fragment, base: Tensor, news: list[Callable[[], object]]) -> list[slice]:
        """The parts where ``base`` is damaged, so that the pending work is unknown; adds events to ``news``."""
        applied = fragment.applied
        found = damage(base, applied.sums["anchor"]) if base is applied.anchor else []
        if found:
            data = {"blocks": len(found)}
            version = applied.meta.version
            news.append(partial(self._group.emit, "repaired", fragment=fragment.index, version=version, data=data))
        return found
