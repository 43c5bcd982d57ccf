"""Where a replica stands in its job: the part of a wrapped optimizer that only reads, apart from `stop`."""

from __future__ import annotations

import sys
import zlib
from dataclasses import fields

from ftopt.errors import UserError, check_whole
from ftopt.optimizer.counts import Status
from ftopt.optimizer.delegating import DelegatingOptimizer

_REASON_CHARS = 200


class Placed(DelegatingOptimizer):
    """A wrapped optimizer that knows its replica's place."""

    @property
    def start_step(self) -> int:
        """The job's inner step at which this replica started (0 at a cold start), where schedulers begin."""
        return self._core.standing().start_step

    @property
    def inner_step(self) -> int:
        """The job's committed inner step plus this replica's pending steps: the position of its parameters, for
        schedules.

        It jumps when a version contains more steps than this replica has taken, and repeats numbers after pending steps
        were dropped (NaN, twice out of line) or undone: see `passed`. For a method that exchanges gradients it is only
        the committed inner step: pending gradients have not moved parameters yet, and all replicas take the next step
        at the same rate.
        """
        return self._core.standing().inner_step

    def passed(self, *, every: int) -> bool:
        """Whether `inner_step` has passed a multiple of ``every`` since this line last asked, or since the start.

            while optimizer.inner_step < 10_000:
                ...
                optimizer.step()
                if optimizer.passed(every=500):
                    evaluate()

        For periodic actions of a loop. `inner_step` jumps (from 286 to 301, say) when a version contains more steps
        than this replica has taken, so ``inner_step % 100 == 0`` misses some, and sees others twice if steps are
        dropped. If it passes several multiples at once, this is True once. A replica that joins or resumes begins at
        its `start_step`, and passes no multiple up to that. Each line of your code, with each value of ``every``, is a
        separate question: two lines that ask for every 100 steps both get True. In a replica of several ranks, all that
        ask the same question get the same answer.

        Raises:
            UserError: ``every`` is not a whole number of 1 or more.
        """
        check_whole("every", every, 1, of="inner steps", hint="use every=100")
        now, caller = self._core.standing(), sys._getframe(1)
        question = caller.f_code, caller.f_lineno, every
        return now.started and self._core.passed.ask(
            question, every, start_step=now.start_step, inner_step=now.inner_step
        )

    def stop(self, reason: str) -> None:
        """Stops the job: asks the loops of all its replicas to end, as after an evaluation that is good enough.

            while optimizer.inner_step < 10_000 and not optimizer.stopped:
                ...
                optimizer.step()
                if optimizer.passed(every=500) and evaluate() > 0.99:
                    optimizer.stop("accuracy above 0.99")

        It only asks, and returns at once: each loop ends when it sees `stopped`. Then `close`, or the end of
        ``with optimizer:``, hands in pending steps, waits for the others, and leaves with the same version. Loops that
        do not check `stopped` train on to their own end; the others wait for them only as long as for any replica near
        its end. A replica that joins meanwhile finds the job stopped. In a replica of several ranks all ranks call it;
        they see `stopped` after the next step. Of several calls, the first reason counts.

        Raises:
            UserError: ``reason`` is not a text, or empty.
            RuntimeError: before the start.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(f"stop({reason!r:.60}); must be the reason, for all logs, such as 'the loss has converged'")
        self._core.stop(reason[:_REASON_CHARS])

    @property
    def stopped(self) -> str:
        """Why the job was stopped (`stop`), by this replica or another one; "" if it was not."""
        return self._core.standing().stopped

    @property
    def local_steps(self) -> int:
        """Inner steps that this replica has executed in this incarnation."""
        return self._core.standing().local_steps

    @property
    def pending_steps(self) -> int:
        """Inner steps of this replica that no committed state contains yet."""
        return next(iter(self._core.standing().pending_steps), 0)

    @property
    def version(self) -> int:
        """Outer steps that are in the committed state (of fragment 0, if there are several); 0 before the start."""
        return next(iter(self._core.standing().versions), 0)

    @property
    def status(self) -> Status:
        """Everything about this replica's place at once, with the versions and pending steps of each fragment."""
        now = self._core.standing()
        return Status(**{field.name: getattr(now, field.name) for field in fields(Status)})

    def digest(self) -> str:
        """SHA-256 (hex) of the committed state: anchor and outer optimizer state. Equal on up-to-date replicas, and on
        all ranks of one. (With a method that exchanges gradients, only rank 0 of an island has it right after a
        ``step()``.)
        """
        return self._core.started().digest()

    @property
    def replica(self) -> str:
        """This replica's id in its job.

        Raises:
            RuntimeError: of a detached copy.
        """
        if self._core.group is None:
            raise RuntimeError("a copy of a wrapped optimizer is in no job; use the original")
        return self._core.group.replica

    @property
    def seed(self) -> int:
        """A seed that differs between replicas, and is the same whenever this one starts: from 0 to 2^32 - 1, a hash of
        `replica`. For data of its own: ``torch.manual_seed(optimizer.seed)``."""
        return zlib.crc32(self.replica.encode())
