"""`Checkpoints`: the part of a training loop that lets its job resume after all replicas have died.

Connects the optimizer's state (`ftopt.optimizer.saved.capture`), the loop's other state, and the files
(`ftopt.checkpoint`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftopt.checkpoint.manifest import label
from ftopt.checkpoint.part import Part, SavedVersion
from ftopt.checkpoint.reader import start_of
from ftopt.checkpoint.resuming import Resuming
from ftopt.checkpoint.writer import Writer
from ftopt.common.launched import tell_end
from ftopt.common.paths import user_path
from ftopt.common.plural import count
from ftopt.errors import UserError, check_bool, check_whole, names_arguments
from ftopt.optimizer.saved import extra_state
from ftopt.optimizer.saved.capture import Cut, SavedReplica
from ftopt.optimizer.saved.layout import layout, refusals
from ftopt.optimizer.saved.loop import Loop, Stateful
from ftopt.optimizer.wrapper import ReplicaOptimizer
from ftopt.step import inner_state
from ftopt.step.tensors.flat import some
from ftopt.step.tensors.pool import CopyPool
from ftopt.sync.protocol.wire import plain

_log = logging.getLogger(__name__)
_CLOSE_S = 60.0


class Checkpoints:
    """One replica's part in the checkpoints of its job.

        checkpoints = ftopt.Checkpoints("/shared/job7", optimizer, every=5, keep=2)
        checkpoints.resume()                        # from the newest complete one, if any
        with optimizer:
            scheduler = LambdaLR(optimizer, lambda _: rate(optimizer.inner_step))
            checkpoints.include(scheduler=scheduler, loader=loader)
            for batch in loader:
                ...
                optimizer.step(); scheduler.step(); optimizer.zero_grad()
                checkpoints.step()
            checkpoints.close()

    Args:
        folder: the folder of the job's checkpoints; all replicas must see the same one.
        optimizer: the optimizer that `ftopt.wrap` returned; not started yet.
        every: outer steps (of fragment 0) from one checkpoint to the next, >= 1. Default 5. None: writes none.
        keep: number of complete checkpoints to keep, >= 1. Default 2.
        shared: False: the folder belongs to this replica alone. Its checkpoints are complete with this replica's part:
            a job that resumes from one begins with the committed state, and with this replica's inner optimizer and
            pending steps. Default True.

    When the optimizer is closed in good order, its last version is saved, too, unless it already is; that checkpoint is
    complete if all members of that outer step leave.

    Raises:
        UserError: ``folder`` is a file; an argument has the wrong type, or is out of range.
    """

    @names_arguments("ftopt.Checkpoints(folder, optimizer, every=5)")
    def __init__(
        self,
        folder: str | Path,
        optimizer: ReplicaOptimizer,
        *,
        every: int | None = 5,
        keep: int = 2,
        shared: bool = True,
    ) -> None:
        if every is not None:
            every = check_whole("every", every, 1, of="outer steps", hint="use every=5, or None for no checkpoints")
        keep = check_whole("keep", keep, 1, of="checkpoints", hint="use keep=2")
        if not isinstance(folder, str | os.PathLike):
            raise UserError(f"folder={folder!r:.60}; must be the path of a folder that all replicas see")
        if not isinstance(optimizer, ReplicaOptimizer):
            raise UserError(
                f"optimizer is a {type(optimizer).__name__}; give the one that ftopt.wrap() returned, as in "
                "ftopt.Checkpoints(folder, optimizer)"
            )
        self._core, self._saving = optimizer._core, optimizer._core.saving
        group = self._core.group
        if group is None:
            raise UserError("the optimizer is a copy without a group; give the one that ftopt.wrap() returned")
        where = user_path(folder)
        if where.exists() and not where.is_dir():
            raise UserError(f"checkpoints need a folder, and {folder} is a file; give another path")
        self._group = group
        self._every, self._shared = every, check_bool("shared", shared)
        self._writer = Writer(
            where, keep=keep, emit=lambda name, data: group.emit(name, data=data), replica=group.replica
        )
        self._end_failed = False  # the checkpoint of the last version was not begun, and the log says so
        self._warned_of = ""  # the label of the last checkpoint that the log reports as not saved
        self._tried = self._begun = 0  # attempts whose checkpoint was due, and whose checkpoint was begun
        self._copies = CopyPool()
        self._loop = Loop(self._core.model)
        self._saving.loop = weakref.proxy(self._loop)  # included objects, such as schedulers, refer to the optimizer
        self._resuming = Resuming(where, self._core, self._loop)
        self._looked_at = False
        """Whether the included objects and the model's tensors have been checked."""
        self._saving.while_waiting, self._saving.before_leaving = self.step, self._leave
        self._saving.after_leaving = self._writer.mark.remove
        if shared or self._saving.place[1] == 1:  # the ranks of an island read it on every host
            self._saving.fallback = self._resuming
        self._saving.folder = where
        tell_end(checkpoints=str(where.absolute()))

    # Resuming.

    def resume(self, path: str | Path | None = None, *, replicas: Sequence[str] | None = None) -> bool:
        """Makes the optimizer resume from a checkpoint when it starts; call this before ``with optimizer:``.

        Args:
            path: a checkpoint, or a folder of several: the newest complete one. Default: this job's folder, which may
                be empty.
            replicas: ids of all replicas that the job has now. Default: the checkpoint's replicas and this one; if the
                checkpoint holds this replica alone, also the job's others, each with a checkpoint of its own. All
                replicas must get the same list. They adopt the pending work of missing replicas.

        Returns:
            Whether there was a checkpoint; False for a spare, which takes the state of the replicas that train.

        Raises:
            UserError: ``path`` has no checkpoint; the checkpoint is damaged, or of another model or method (raised at
                the start). The message names the file, and the previous sound checkpoint, if any.
            RuntimeError: the optimizer has started.
        """
        if not isinstance(path, str | os.PathLike | None):
            raise UserError(f"path={path!r:.60}; must be the path of a checkpoint, or of a folder of checkpoints")
        listed = replicas is None or (isinstance(replicas, Collection) and not isinstance(replicas, str))
        if not listed or not all(isinstance(x, str) for x in replicas or ()):
            raise UserError(f"replicas={replicas!r:.60}; must be a list of the replicas' ids")
        tell_end(resumes=True)
        if self._group.standby:
            _log.warning(
                "replica %s stands by: it takes the state of the replicas that train, and resumes no checkpoint",
                self._group.replica,
            )
            return False
        resumed = self._resuming.resume(None if path is None else user_path(path), replicas)
        folder, rank = self._writer.folder, self._saving.place[0]
        if resumed is not None and not rank and resumed.parent.resolve() == folder.resolve():
            self._writer.name_other(self._writer.mark.living(folder, start_of(resumed) or ""))
        return resumed is not None

    def include(self, **state: Stateful) -> None:
        """Adds objects with ``state_dict`` and ``load_state_dict`` to the loop's state, by name.

        Call it when all objects exist and before the first step: after a resume it restores them, together with the
        random number generators and the learning rates that a new scheduler has changed. In an island each rank
        includes its own objects, under the same names, and gets their states back; ``state_dict()`` is called on all
        ranks, so that it may be collective.

        A state keeps the types that it was saved with.

        Raises:
            UserError: an object has no state dict, or its state dict holds a value that a checkpoint cannot (for
                iterable objects, and in an island, the first `step` raises this); the checkpoint holds other objects
                but lacks one of these, or holds a state for each rank of an island of another size. If the checkpoint
                holds no loop state of this replica, which is new in the job or included nothing before, this is logged.
        """
        self._loop.add(state)
        self._resuming.restore_loop(state)
        if self._every is not None and self._saving.place[1] == 1:  # a state dict may be collective
            self._loop.check(begun=False)

    # Saving.

    def step(self) -> bool:
        """Starts a checkpoint if one is due; call it at the end of each iteration of the loop.

        When an outer step at which a checkpoint is due has been applied, this copies what training changes and starts
        to write it in the background. At the end of the data, while the loop waits for a batch and other replicas train
        on, the loader calls it.

        Returns:
            Whether it started to write one.

        Raises:
            FtoptError: the thread that writes checkpoints has failed. A disk's failures are only logged, and reported
                by the event ``checkpoint_failed``.
        """
        if self._saving.place[1] == 1:  # else all ranks raise rank 0's error at the next checkpoint
            self._writer.check()
        cut = self._saving.cut()
        if self._every is not None and not self._looked_at:
            self._look()
        if self._every is None or cut is None or cut.attempt <= self._tried or cut.version % self._every:
            return False
        return self._begin("checkpoints.step", cut)

    def _look(self) -> None:
        """Refuses included objects that a checkpoint cannot hold; names the model's tensors and states that it cannot
        hold, which are left out, and another job's checkpoints in the folder."""
        self._looked_at = self._saving.check_included("checkpoints.step")
        if not self._looked_at:
            return
        if not self._saving.place[0]:
            self._look_for_others()
        self._loop.check(begun=True)
        reasons = extra_state.refusals(self._core.model) if self._core.model is not None else []
        if not self._saving.place[0] and (model := self._saving.model) is not None:
            reasons += [*refusals(model), *inner_state.refusals(self._core.inner)]
        if reasons:
            named = some([reason.partition(", which")[0] for reason in reasons])
            _log.warning(
                "replica %s: the checkpoints do without %s that they cannot hold, which a resume leaves as the program "
                "makes them: %s",
                self._group.replica, count(len(reasons), "value"), named,
            )  # fmt: skip

    def _look_for_others(self) -> None:
        """Marks the folder as written by this process, and warns of another job's checkpoints in it."""
        committed = self._core.standing().committed
        if committed is None or committed.record is None:
            return
        start = committed.record.chain[:8]
        self._writer.mark.leave(self._writer.folder, start)
        self._writer.name_other_jobs(start)

    def last(self) -> bool:
        """Starts a checkpoint of the job's current state unless there is one: for the end, when all replicas are
        present."""
        cut = self._saving.cut()
        if self._every is None or cut is None or cut.attempt <= self._begun:
            return False
        self._writer.wait(_CLOSE_S)
        return self._begin("checkpoints.last", cut)

    def move_to(self, folder: Path) -> None:
        """Writes to another folder from now on; before the first checkpoint."""
        self._resuming.folder = self._writer.folder = folder
        tell_end(checkpoints=str(folder.absolute()))

    def _leave(self, timeout_s: float) -> None:
        """Saves the last version, unless it is saved: the optimizer has handed in its last steps."""
        deadline = time.monotonic() + timeout_s
        cut = self._saving.cut()
        if self._every is None or cut is None:
            return
        self._writer.wait(timeout_s)
        if cut.attempt > self._begun:
            try:
                self._begin("checkpoints.last", cut)
            except Exception as error:  # included objects may be closed already; leaving goes on
                _log.error("replica %s: the version that it leaves is not saved", self._group.replica, exc_info=error)
                self._end_failed = True
                return
        if self._writer.wait(max(0.0, deadline - time.monotonic())):
            self._is_saved()
        else:
            _log.warning(
                "replica %s has left, and its last checkpoint is still being written: close() of the checkpoints waits "
                "for it; if the process ends before, it is lost: %s",
                self._group.replica, self._writer.newest(),
            )  # fmt: skip

    def close(self, timeout_s: float = _CLOSE_S) -> bool:
        """Waits until the checkpoint being written is done. Raises as `step`.

        Returns:
            Whether this replica's part of the last checkpoint that was due is on disk. If not, the log says why, and
            which checkpoint is the newest. In an island rank 0 knows; the others return True.
        """
        done = self._writer.close(timeout_s)
        self._writer.check()
        if not done:
            _log.error(
                "replica %s: its last checkpoint is still being written after %g s: %s",
                self._group.replica, timeout_s, self._writer.newest(),
            )  # fmt: skip
        return done and self._is_saved()

    def _is_saved(self) -> bool:
        """Whether the last checkpoint that was due has this replica's part; says once if not."""
        lacks = self._writer.lacks
        if lacks is not None and self._warned_of != lacks[0]:
            self._warned_of = lacks[0]
            _log.error(
                "replica %s: its last checkpoint, %s, is not saved: %s; %s",
                self._group.replica, *lacks, self._writer.newest(),
            )  # fmt: skip
        return lacks is None and not self._end_failed

    def _begin(self, call: str, cut: Cut) -> bool:
        self._tried = cut.attempt  # on all ranks of an island, which know the same cut
        begun = self._saving.on_leader(call, lambda: self._save(cut))
        if begun:
            self._begun = cut.attempt
        return begun

    def _save(self, cut: Cut) -> bool:
        started = time.perf_counter()
        self._writer.check()
        if not self._writer.idle(cut.version, cut.attempt):
            return False
        self._copies.recycle()
        try:
            loops = self._saving.capture_loops(self._copies)
        except UserError as error:
            self._writer.failed(label(cut.version, cut.attempt), str(error))
            return False
        saved = self._saving.capture(self._copies)
        own = {"replica": saved.own, "loops": loops}
        self._writer.begin(self._part(cut, saved, own))
        stall_s = time.perf_counter() - started
        self._group.emit("checkpointing", version=cut.version, attempt=cut.attempt, data={"stall_s": stall_s})
        return True

    def _part(self, cut: Cut, saved: SavedReplica, own: Mapping[str, Any]) -> Part:
        held, outer, model = saved.held, self._core.started(), self._saving.model
        assert model is not None
        places, fixed = layout(outer, model)
        offered = {c.fragment: c.last_step for c in held.contributions}
        return Part(
            replica=held.replica,
            incarnation=held.incarnation,
            attempt=cut.attempt,
            version=cut.version,
            members=cut.members if self._shared else 1,
            inner_step=cut.inner_step,
            committed=tuple(SavedVersion(plain(v.record), v.digest, v.tensors) for v in saved.committed),
            offered=tuple(offered.get(index) for index in range(len(saved.committed))),
            membership=plain(dataclasses.replace(held, records=(), contributions=())),
            lines=outer.fingerprint().lines,
            own=own,
            model=places,
            fixed=fixed,
        )
