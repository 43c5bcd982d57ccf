"""The common part of all callbacks: join after the trainer's loads, follow the job's inner step, leave before a
load."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from ftopt.checkpoint.checkpoints import Checkpoints
from ftopt.common.weakly import weakly
from ftopt.data.loader import DataLoader
from ftopt.errors import UserError
from ftopt.optimizer import ReplicaOptimizer
from ftopt.optimizer.asked import TIMEOUT_S, left_s
from ftopt.optimizer.ending.last_round import last_round
from ftopt.optimizer.schedules import advance
from ftopt.optimizer.torch_schedulers import counted, go_back

_log = logging.getLogger(__name__)


class Membership:
    """A trainer's part in a job.

    Args:
        optimizer: the optimizer that `ftopt.wrap` returned.
        checkpoints: the job's checkpoints, of the same optimizer; None: it has none.

    Attributes:
        ours: whether this object joins and leaves. False: user code does, by ``with optimizer:``.
    """

    def __init__(self, optimizer: ReplicaOptimizer, checkpoints: Checkpoints | None) -> None:
        if not isinstance(optimizer, ReplicaOptimizer):
            raise UserError(
                f"optimizer is a {type(optimizer).__name__}; give the one that ftopt.wrap() returned, and that the "
                "trainer steps"
            )
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            raise UserError(
                f"checkpoints is a {type(checkpoints).__name__}; must be ftopt.Checkpoints(folder, optimizer), or None"
            )
        self.optimizer, self.checkpoints = optimizer, checkpoints
        self.ours = not optimizer._core.standing().started
        self._left = self._fetched = self._stay_ahead = False
        if self.ours and checkpoints is not None:
            checkpoints.resume()

    def join(self, schedulers: list[Any], loader: object, *, planned: int) -> None:
        """Joins the job unless that is done; call it after the trainer's loads, right before the loop.

        ``planned``: the inner step at which the trainer ends; below 1: unknown.

        Raises:
            UserError: it has left already.
        """
        if self.over:
            raise UserError(
                "this optimizer has left its job, at the end of an earlier run of the trainer; to run it several "
                "times, put all of them into one `with optimizer:`, and make the callback inside; else call "
                "ftopt.wrap() anew, with a new group"
            )
        core = self.optimizer._core
        if self.ours and core.ranks.size == 1:
            # Not every trainer has a hook for this.
            core.leaving.before_end = weakly(self.leave_at_once, None)  # else a cycle would keep the model
        core.schedules.leave_alone()  # `follow` advances them, since it knows what the trainer counts
        core.joining.planned = max(0, planned)
        core.joining.warn(planned)
        self._fetched = core.start()
        self.optimizer.__enter__()
        self._left = False
        self.follow(schedulers)
        if self.checkpoints is not None:
            state: dict[str, Any] = {f"scheduler{i}": each for i, each in enumerate(schedulers)}
            if isinstance(loader, DataLoader):
                state["loader"] = loader
            self.checkpoints.include(**state)

    def check_resumed(self, step: int, *, new: str, old: str) -> None:
        """Checks, after joining, a trainer that has loaded a checkpoint of its own, of step ``step``.

        Args:
            new, old: advice for a new job that begins with these weights, and for going on with the old one.

        Raises:
            UserError: the job begins with these weights, at step 0: its schedules and data would begin anew, and the
                trainer would overwrite the checkpoints of its former run. This replica has left.
        """
        at = self.optimizer.inner_step
        if step <= at:
            return
        if at == 0 and self.ours and not self._fetched:  # the job begins with this replica's weights
            self.fail()
            raise UserError(
                f"the trainer resumes at step {step}, and the job begins at step 0, since no replica has a checkpoint "
                f"of it: data and schedules would begin anew; to go on with the job, {old}; to begin a new one with "
                f"these weights, {new}"
            )
        _log.warning(
            "the trainer resumes at step %d, and the job stands at step %d, by which training goes", step, at
        )  # fmt: skip

    def follow(self, schedulers: list[Any]) -> None:
        """Brings schedulers to the job's inner step, also back to it: a pass whose gradient waits, or whose steps are
        dropped, has not moved the parameters, and replicas that take each step alike need one rate."""
        at = self.optimizer.inner_step
        counts = [counted(x) for x in schedulers]
        if max(counts, default=0) > at and not self._stay_ahead:
            self._stay_ahead = not go_back(schedulers, [min(at, count) for count in counts])
            if self._stay_ahead:
                _log.warning(
                    "the learning rate schedule is at step %d, and the job at %d: steps were dropped; the schedule "
                    "stays ahead, since its steps alone do not give its present rates",
                    max(counts), at,
                )  # fmt: skip
        for scheduler in schedulers:
            advance(scheduler, at)

    def stepped(self) -> None:
        """Called between two steps of the trainer."""
        if self.checkpoints is not None:
            self.checkpoints.step()

    def evaluating(self) -> None:
        """Called between two batches of an evaluation, which may take longer than a signal allows."""
        core = self.optimizer._core
        if core.ranks.size == 1 and self.joined and not self.over:  # an island's ranks evaluate independently
            core.leaving.if_asked()

    @property
    def joined(self) -> bool:
        """Whether it has joined the job, even if it has left since."""
        return self.optimizer._core.standing().started

    @property
    def over(self) -> bool:
        """Whether it has left the job."""
        return self.optimizer._core.closed

    @property
    def step(self) -> int:
        """The job's inner step; at the end, that of the global parameters."""
        return self.optimizer.status.committed_step if self.over else self.optimizer.inner_step

    def leave(self, planned: int) -> None:
        """Ends at the ``planned`` step of the job, or at an earlier one: takes part in a last round, saves a last
        checkpoint, and leaves. Afterwards the model has the global parameters. Idempotent."""
        if self._left or self.over:
            return
        self._left = True
        self.optimizer.train()
        offer = last_round(self.optimizer, planned)
        if self.checkpoints is not None:
            self.checkpoints.last()
            self.checkpoints.close()
        if not self.ours:
            self.optimizer.eval()
            return
        self._close(offer=offer, timeout_s=TIMEOUT_S)

    def leave_at_once(self) -> None:
        """Ends the process' part on request: hands in pending steps, saves a last checkpoint within the time left, and
        leaves. Afterwards the model has the global parameters. Idempotent."""
        if self.ours and not self.over:
            self._close(offer=True, timeout_s=left_s(), early=True)

    def fail(self) -> None:
        """Leaves without the pending steps after an exception, which may come within a step. Idempotent."""
        if self.ours and not self.over:
            self.optimizer.close(flush=False, early=True)
            if self.checkpoints is not None:
                self.checkpoints.close(left_s())

    @torch.inference_mode(False)
    def _close(self, *, offer: bool, timeout_s: float, early: bool = False) -> None:
        deadline, core = time.monotonic() + timeout_s, self.optimizer._core
        core.leaving.close(flush=True, timeout_s=timeout_s, early=early, offer=offer)
        if self.checkpoints is not None:
            self.checkpoints.close(max(0.0, deadline - time.monotonic()))
        if self.joined:  # else a signal came before
            core.evaluating.keep()


def passed(before: int, now: int, every: float | None) -> int:
    """The last multiple of ``every`` that the job has reached or passed since step ``before``; 0 if none."""
    if not every or every < 1 or now // every <= before // every:
        return 0
    return int(now // every * every)


def finish(optimizer: ReplicaOptimizer, planned: int) -> None:
    """Ends a loop of your own at the ``planned`` inner step of the job: takes part in a last round, and leaves.

        for batch in loader:
            if optimizer.inner_step >= planned:
                break
            ...
        finish(optimizer, planned)

    `ReplicaOptimizer.steps` does both for a loop that counts steps.

    All replicas that do so end with the same global parameters. A replica that came late may have taken a few more
    steps when the others' last round ended the job: the log says that these are not handed in.
    """
    optimizer.train()
    if not optimizer._core.closed:
        offer = last_round(optimizer, planned)
        optimizer._core.leaving.close(flush=True, timeout_s=TIMEOUT_S, offer=offer)
