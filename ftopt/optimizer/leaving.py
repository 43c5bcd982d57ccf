"""A replica's leave of its job: asked by a signal, at the end of its loop, or when its optimizer is dropped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from ftopt.common.launched import tell_end
from ftopt.common.plural import count
from ftopt.events import check_not_telling
from ftopt.optimizer.asked import Leave, leave, left_s
from ftopt.optimizer.ending.at_exit import at_exit
from ftopt.optimizer.ending.hand_in import (
    end_together,
    hand_in,
    not_stepped,
    patience_s,
    warn_how_to_resume,
    warn_left,
    warn_not_stepped,
    warn_waits,
)
from ftopt.optimizer.evaluating import Evaluating
from ftopt.optimizer.saving import Saving
from ftopt.optimizer.training import Training
from ftopt.step.outer.step import OuterStep
from ftopt.sync.group import ReplicaGroup

UNSAVED = "; it has no ftopt.Checkpoints: only replicas that train on keep the model, and what the script itself saves"
"""What a process that is asked to leave says of its model; the first signal is the last moment to know."""


class Leaving:
    """The end of a replica's membership. See `Leaver` for its part at a script's end.

    Attributes:
        before_end: called when this process is asked to leave, before `Leave` ends the user's loop.
    """

    def __init__(self, training: Training, evaluating: Evaluating, saving: Saving) -> None:
        self.before_end: Callable[[], object] = lambda: None
        self._training, self._evaluating, self._saving = training, evaluating, saving
        self.is_apart = False
        """Whether this replica, of one rank, has left without the job, whose versions lack its last steps."""
        self._dropped_at: list[list[int]] | None = None
        """The parameters' version counters when user code dropped the optimizer."""

    def __del__(self) -> None:
        if self._training.outer is not None and not self._training.closed:
            at_exit.dropped(self)

    # Asked to leave.

    def if_asked(self) -> None:
        """Ends the user's loop if this process is asked to leave."""
        group, ranks = self._training.group, self._training.ranks
        if group is not None and (why := ranks.why()):
            if ranks.rank:
                raise Leave(0)
            unsaved = "" if self._saving.folder is not None else UNSAVED
            leave(group.replica, f"{why}{unsaved}", self.before_end)

    def look_while_waiting(self) -> None:
        """Called while the loader waits for units."""
        self._training.ranks.each("look", self._training.ranks.look)
        self.if_asked()

    def if_worker_died(self, error: BaseException | None) -> None:
        """Leaves in good order, by `Leave`, if a data loader's worker has died of the signal that asks this process to
        leave. One rank of several does not, since others may be in a different step."""
        training = self._training
        if (
            training.ranks.size > 1
            or training.asked is None
            or training.group is None
            or not (why := training.asked.why_worker_died(error))
        ):
            return
        try:
            leave(training.group.replica, f"{why}, which has ended a worker of its data loader, too", self.before_end)
        except Leave:
            self.close(flush=True, timeout_s=left_s())
            raise

    @property
    def _is_asked(self) -> bool:
        asked = self._training.asked
        return asked is not None and bool(asked.why())

    # Leaving.

    def close(self, *, flush: bool, timeout_s: float, early: bool = False, offer: bool = True) -> None:
        """Leaves the job; see `ReplicaOptimizer.close`. Of several ranks one may leave without ``flush``, at once.
        ``offer``: with ``flush``, also offer the pending steps; else only wait for the others that end, and take their
        newest version."""
        training = self._training
        if training.closed or training.group is None:
            return
        check_not_telling("close()")
        training.closed = True
        ranks, after = training.ranks, ExitStack()
        try:
            if ranks.leaves_whole(flush=flush and training.outer is not None):
                with ranks.call("close"):
                    self._leave(training.group, after, flush=flush, timeout_s=timeout_s, early=early, offer=offer)
            else:
                self._keep_loaded(after)
                early = early or training.raised.error() is not None
                ranks.part(early=early, reason=training.raised.text())
        finally:
            if (outer := training.outer) is not None:
                at = outer.fragments[0].state.meta.version, outer.inner_step()
                tell_end(version=at[0], inner_step=at[1], pending=max(outer.pending_by_fragment(), default=0))
            at_exit.remove(self)
            if training.asked is not None:
                training.asked.left()
            ranks.left()
            training.group.close()
            after.close()
            self._saving.let_go()

    def _keep_loaded(self, after: ExitStack) -> None:
        """Restores weights that were loaded last to the model ``after`` leaving."""
        loads = self._training.loads
        if loads is not None and (loaded := loads.keep()) is not None:
            after.callback(loaded)

    def _leave(
        self, group: ReplicaGroup, after: ExitStack, *, flush: bool, timeout_s: float, early: bool, offer: bool
    ) -> None:
        """Hands in pending steps, unless ``flush`` is False, and says goodbye."""
        training = self._training
        self._evaluating.exit()
        if (outer := training.outer) is None:
            return
        ranks, raised = training.ranks, training.raised
        self._keep_loaded(after)
        decided_s, now_s = min(timeout_s, patience_s(group)), ranks.now_s()
        deadline, decided_by = ranks.same((now_s + timeout_s, now_s + decided_s))
        if flush and not group.closed:
            group.check()
        training.set_back(closing=True)
        ranks.pull()
        if not_stepped(outer) and not ranks.rank:
            warn_not_stepped(group.replica)
        dropped = training.dropped
        if not dropped:  # else user code may use the model freely
            after.enter_context(outer.at_rest())
        reason = "its optimizer was dropped without close()" if dropped else raised.why_at_once(early=early)
        obstacle, asked = "", bool(ranks.why())  # a replica that a signal reaches later has ended already
        early = ranks.same(early or asked)
        if flush:
            self._hand_in(outer, group, decided_by, early=early, offer=offer)
            if offer:
                obstacle = group.obstacle()
                reason = obstacle or f"no round has taken them within {decided_s:g} s"
            ranks.push()  # saving begins by reading the slices from the model
            self._saving.before_leaving(max(0.0, deadline - ranks.now_s()))
        else:
            outer.report("leaving")
        early = ranks.same(early or raised.error() is not None)
        if not early:
            group.finish()
        wait_s = max(0.0, decided_by - ranks.now_s()) if flush else 0.0
        group.leave(timeout_s=wait_s, early=early, reason=raised.text())
        if flush and not group.closed:
            group.check()
        if flush or not dropped:  # else a gradient would step the inner optimizer in the user's model
            outer.apply()
        tell_end(early=early, steps=outer.counters.local_steps, pending=max(outer.pending_by_fragment(), default=0))
        training.after_outer_work(outer)
        ranks.push()
        self.is_apart = ranks.size == 1 and bool(obstacle) and any(outer.pending_by_fragment())
        if not ranks.rank:
            warn_left(outer, group.replica, reason, apart=self.is_apart)
            if asked or raised.interrupted(flush=flush):
                alone = not group.members(0) - {group.replica}
                warn_how_to_resume(outer, group.replica, self._saving.unsaved() if alone else "")
        ranks.leave()

    def _hand_in(self, outer: OuterStep, group: ReplicaGroup, deadline: float, *, early: bool, offer: bool) -> None:
        """Offers pending steps to successive rounds until they are decided, or until ``deadline`` by rank 0's clock."""
        training, ranks = self._training, self._training.ranks
        with outer.at_rest():
            if offer:
                if ranks.size == 1:
                    warn_waits(outer, group, deadline - ranks.now_s())
                hand_in(outer, group, training.inner.largest_lr, deadline, ranks.now_s, early=early)
            else:
                outer.report("leaving")
            # The model of a dropped optimizer gets no final version.
            if not ranks.same(early or training.dropped or training.raised.error() is not None):
                but, timeout_s = at_exit.beside(self), max(0.0, deadline - ranks.now_s())
                tell = end_together(outer, group, but=but, timeout_s=timeout_s, until=lambda: self._is_asked)
                if not ranks.rank:
                    tell()
        training.after_outer_work(outer)  # before saving

    # At the end of the script, or of the optimizer: see `Leaver`.

    @property
    def trains(self) -> tuple[nn.Module | None, str]:
        return self._training.trains

    def announce(self) -> None:
        """Announces that no round need wait for this replica. A replica that leaves early opens a round first."""
        outer = self._training.outer
        if outer is not None and not self._training.closed and not self._is_asked:
            outer.report("leaving")

    def disown(self) -> None:
        self._training.closed = self._training.forked = True

    def unfinished(self) -> str:
        outer, group = self._training.outer, self._training.group
        pending = 0 if outer is None or group is None else max(outer.pending_by_fragment())
        return f"replica {group.replica} has {count(pending, 'inner step')} pending" if pending and group else ""

    def note_dropped(self) -> None:
        self._training.dropped = True
        self._dropped_at = [fragment.view.versions() for fragment in self._training.started().fragments]

    def part_from_model(self) -> str:
        training = self._training
        outer, group = training.started(), training.group
        assert group is not None
        self._saving.let_go()  # a checkpoint would read the model
        if outer.gradients is not None or group.global_batch is not None:
            if training.loads is not None:
                training.loads.keep()
                training.loads = None  # loaded weights stay in the model
            return "the replicas take their steps together"
        versions = [fragment.view.part_from_model() for fragment in outer.fragments]
        if training.anchor.there:
            self._evaluating.take_out()
        elif versions != self._dropped_at:
            return "the parameters have been changed since"
        return ""
