"""The training thread's view of the machine, published by the network thread and read without a lock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftopt.errors import FtoptError, UserError
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.replica.changed import Changed


@dataclass(frozen=True, slots=True)
class FragmentView:
    """The last published view of a fragment.

    Args:
        proposed: number of proposals on their way to the machine.
        offered: whether the machine has an outstanding contribution.
        released: whether the training thread is not to wait for that contribution.
        called_in: whether the others wait for a contribution.
        means: the means of the replicas' readings.
        stopped: number of attempts that have ended without a commit so far.
    """

    proposed: int = 0
    offered: bool = False
    released: bool = False
    called_in: bool = False
    means: m.Means | None = None
    stopped: int = 0

    @property
    def outstanding(self) -> bool:
        """Whether a contribution is not decided yet."""
        return self.offered or self.proposed > 0

    @property
    def awaited(self) -> tuple[object, ...]:
        """What a thread may wait for."""
        return self.outstanding, self.released and not self.proposed, self.called_in, self.means


class View:
    """The only state that the training thread and the network thread share; its methods are its only writers."""

    def __init__(self, *, standby: bool = False) -> None:
        self.changed = Changed()
        """Notified after each change."""
        self.fragments: list[FragmentView] = []
        self.incarnation = 0
        self.ready = False
        """Whether every fragment has the committed state."""
        self.may_train = False
        self.restoring = False
        """Whether a checkpoint is to be restored; no connection is opened meanwhile."""
        self.waiting = False
        """Whether the training thread waits for a decision."""
        self.copies = 0
        """Number of copies that the training thread has offered."""
        self.closed = False
        self.standby = standby
        """Whether it is a spare that was not promoted."""
        self.over = ""
        """Why this replica (a spare, or one that comes after the job's end) is not needed; "": it is."""
        self.stopped: m.JobStopped | None = None
        """Set when the job is stopped, so that this replica's loop is to end."""
        self.end: m.End | None = None
        """Set when this replica need not wait any longer for others that come to their end."""
        self.failure: FtoptError | None = None
        self._welcomed = False
        self._of_all: tuple[object, ...] = ()
        self._states: dict[int, tuple[object, ...]] = {}
        """What the machine's state was when it was published last: of all fragments together, and of each."""

    def check(self) -> None:
        """Raises the error that has ended this replica's membership. Cheap enough to call every step."""
        if self.failure is not None:
            raise self.failure

    # ------------------------------------------------------------ training thread

    def check_open(self) -> None:
        """Does `check`, and raises UserError if the group is closed, so that nothing more is decided. Cheap enough to
        call every step."""
        if self.failure is not None or self.closed:
            self.check()
            raise UserError(
                "the group of this optimizer is closed, so that its steps go nowhere; leave the job with "
                "optimizer.close(), or the end of `with optimizer:`, which closes the group as well"
            )

    def propose(self, fragment: int) -> None:
        """Counts a proposal as on its way to the machine."""
        with self.changed.lock:
            self.check()
            self._add(fragment, 1)

    def close(self) -> bool:
        """Ends all waiting; False if the view is closed already."""
        with self.changed.lock:
            first, self.closed = not self.closed, True
            self.changed.notify_all()
        return first

    # ------------------------------------------------------------ network thread

    def publish(self, machine: Replica, *, let_in: bool, arrived: int | None = None) -> None:
        """Publishes the machine's state, and wakes the waiting threads if it has news for them. Costs little for the
        fragments that have not changed. ``arrived``: a fragment of which the machine was given a proposal.

        ``let_in``: whether training may start as soon as the machine allows it.
        """
        with self.changed.lock:
            self._welcomed |= machine.welcomed  # a resumed replica holds a state before it is let in
            let_in = let_in and self._welcomed
            self.incarnation = machine.incarnation or self.incarnation
            self.standby = machine.standby
            self.ready, self.may_train = machine.ready and let_in, machine.may_train and let_in
            of_all = self.incarnation, self.standby, self.ready, self.may_train, machine.welcomed
            news, self._of_all = of_all != self._of_all, of_all
            for index, f in enumerate(machine.fragments):
                before, state = self._states.get(index), (f.record, f.offer, f.call, f.last_means)
                if state != before or index == arrived:
                    self._states[index], old = state, self.fragments[index]
                    proposed = max(0, old.proposed - (index == arrived))
                    new = FragmentView(proposed, f.outstanding, f.released, f.called_in, f.means, old.stopped)
                    # In one step: the training thread, which takes no lock, sees a proposal as on its way or offered.
                    self.fragments[index] = new
                    news |= new.awaited != old.awaited or before is None or before[0] is not f.record
            if news:
                self.changed.notify_all()

    def drop(self, fragment: int, count: int) -> None:
        """Drops ``count`` proposals that the machine was never given."""
        with self.changed.lock:
            self._add(fragment, -count)
            self.changed.notify_all()

    def stop(self, fragment: int) -> None:
        """Counts an attempt that has ended without a commit."""
        with self.changed.lock:
            old = self.fragments[fragment]
            self.fragments[fragment] = replace(old, stopped=old.stopped + 1)
            self.changed.notify_all()

    def restore(self, *, done: bool) -> None:
        """Publishes that a checkpoint is to be restored, or that it is ``done``."""
        with self.changed.lock:
            self.restoring = not done
            self._welcomed = self._welcomed and done
            self.changed.notify_all()

    def is_over(self, reason: str) -> None:
        """Publishes that this replica is not needed."""
        with self.changed.lock:
            self.over = reason
            self.changed.notify_all()

    def has_ended(self, end: m.End) -> None:
        """Publishes that this replica need not wait any longer for others that come to their end."""
        with self.changed.lock:
            self.end = end
            self.changed.notify_all()

    def fail(self, error: FtoptError) -> None:
        """Ends this replica's membership; the first reason counts."""
        with self.changed.lock:
            self.failure = self.failure or error
            self.changed.notify_all()

    def _add(self, fragment: int, proposals: int) -> None:
        old = self.fragments[fragment]
        self.fragments[fragment] = replace(old, proposed=max(0, old.proposed + proposals))  # 0: an interrupted one came
