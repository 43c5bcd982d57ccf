"""`OuterOptimizer`: a `torch.optim.Optimizer` around the inner one. `wrap` makes it.

Where user code is in `torch.inference_mode`, as around an evaluation, tensors made for later use would be unusable
outside of it: what makes some leaves that mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ftopt.errors import UserError, check_number, check_whole, without_internals
from ftopt.optimizer.asked import Leave, left_s
from ftopt.optimizer.core import Core
from ftopt.optimizer.counts import checked_loss, whole
from ftopt.optimizer.delegating import DelegatingOptimizer
from ftopt.sync.group import Committed

_REASON_CHARS = 200


class OuterOptimizer(DelegatingOptimizer):
    """A `torch.optim.Optimizer` whose replica takes part in outer steps. Made by `wrap`.

    ``step()`` is the inner optimizer's step and, when the method says so, an outer step after it. Everything
    else of an optimizer (groups, state, rates, hooks, state dicts) is the inner one's.

    A deepcopy or an unpickled copy is *detached*: it steps its (copied) inner optimizer, belongs to no job,
    and says so at its first step.
    """

    def __init__(self) -> None:
        raise UserError("OuterOptimizer is made by ftopt.wrap(inner, model, method, group=group)")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one inner step; then, if it is time, takes part in an outer step.

        The first step joins the job unless ``with optimizer:`` has. If that brought parameters from another replica,
        the gradient at hand belongs to other parameters and is not applied (with a closure it is computed anew).

        Args:
            closure: computes the loss, as for the inner optimizer.

        Returns:
            What the inner optimizer returns.

        Raises:
            RuntimeError: after `close`, or while the outer parameters are in the model (`eval`, `outer_parameters`).
            ftopt.errors.UserError: what trains is not what the replicas agreed on at the start (``docs/methods.md``).
            ftopt.errors.Refused: the job has refused this replica.
            ftopt.errors.Unreachable: this step joins the job, and no coordinator has answered for ``connect_s``.
            ftopt.errors.JobFailed: a replica was lost, with ``sync.on_loss=fail``.
            SystemExit: this process is to leave (``leave_on_signals``), or the torchrun that has started it is gone.
                The step is done.
            ftopt.errors.FtoptError: another thread of ftopt has failed since the last call; ``__cause__`` is why.
                `sync`, `settle` and `close` raise it, too. Nothing has been changed; this replica can only be closed.
        """
        return self._step(closure)

    # Torch would wrap it, for the hooks and the profiler, at twice the cost of all that is done here.
    step.hooked = True  # type: ignore[attr-defined]

    # Where training stands.

    @property
    def start_step(self) -> int:
        """The job's inner step at which this replica started (0 at a cold start): where schedulers begin."""
        return self._core.standing().start_step

    @property
    def replaying(self) -> bool:
        """Whether inner steps of a replica that has died are being done again here (``sync.recover: replay``).

        True at the start, when its random number generators are in place: do not seed them anew then.
        """
        return self._core.training.replays is not None and self._core.training.replays.under_way is not None

    @property
    def inner_step(self) -> int:
        """The job's committed inner step plus this replica's pending steps: where its parameters stand, for schedules.

        It jumps when a version contains more steps than this replica has taken: see `passed`.
        Of a method that exchanges gradients the committed one alone: pending gradients have moved no parameters yet,
        and all replicas take the next step at the same rate.
        """
        return self._core.standing().inner_step

    def passed(self, *, every: int) -> bool:
        """Whether `inner_step` has passed a multiple of ``every`` since this line asked last, or since the start. ::

            while optimizer.inner_step < 10_000:
                ...
                optimizer.step()
                if optimizer.passed(every=500):
                    evaluate()

        For what a loop does now and then. `inner_step` jumps (from 286 to 301, say) when a version contains more steps
        than this replica has taken, so ``inner_step % 100 == 0`` misses some. Where it passes several multiples at
        once, this is True once. A replica that joins or resumes begins at its `start_step`, and passes no multiple up
        to that. Each line of your code, with each value of ``every``, is a question of its own: two lines that ask for
        every 100 steps both get True. In a replica of several ranks the answer is the same on all that ask alike.

        Raises:
            UserError: ``every`` is no whole number, or below 1.
        """
        check_whole("every", every, 1, of="inner steps", hint="use every=100")
        now, caller = self._core.standing(), sys._getframe(1)
        question = caller.f_code, caller.f_lineno, every
        return now.started and self._core.passed.ask(
            question, every, start_step=now.start_step, inner_step=now.inner_step
        )

    def stop(self, reason: str) -> None:
        """Stops the job: asks the loops of all its replicas to end, as after an evaluation that is good enough. ::

            while optimizer.inner_step < 10_000 and not optimizer.stopped:
                ...
                optimizer.step()
                if optimizer.passed(every=500) and evaluate() > 0.99:
                    optimizer.stop("accuracy above 0.99")

        It only asks, and returns at once: each loop ends when it sees `stopped`, and `close`, or the end of
        ``with optimizer:``, then hands in what is pending, waits for the others, and goes with one version. Loops that
        do not look at `stopped` train on to their own end, and are waited for only as long as others that near it. A
        replica that joins meanwhile finds the job stopped. In a replica of several ranks all ranks call it; they see
        `stopped` after the next step. Several calls: the first reason counts.

        Raises:
            UserError: ``reason`` is no text, or empty.
            RuntimeError: before the start.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(f"stop({reason!r:.60}); must be the reason, for all logs, such as 'the loss has converged'")
        self._core.stop(reason[:_REASON_CHARS])

    @property
    def stopped(self) -> str:
        """Why the job was stopped, by this replica or another one (`stop`); "" while it was not."""
        return self._core.standing().stopped

    @property
    def local_steps(self) -> int:
        """Inner steps that this replica has executed in this life."""
        return self._core.standing().local_steps

    @property
    def pending_steps(self) -> int:
        """Inner steps of this replica that no committed state contains yet."""
        return next(iter(self._core.standing().pending_by_fragment), 0)

    @property
    def pending_by_fragment(self) -> tuple[int, ...]:
        """`pending_steps` of each fragment; empty before the start."""
        return self._core.standing().pending_by_fragment

    @property
    def committed(self) -> Committed:
        """Where the committed state of fragment 0 stands."""
        committed = self._core.standing().committed
        if committed is None:
            raise RuntimeError("not started: use `with optimizer:`, or take a first step")
        return committed

    @property
    def versions(self) -> tuple[int, ...]:
        """Each fragment's version; empty before the start."""
        return self._core.standing().versions

    def anchor_digest(self) -> str:
        """SHA-256 (hex) of the committed state: anchor and outer optimizer state. Equal on up-to-date replicas, and on
        all ranks of one. (With a method that exchanges gradients, an island's rank 0 alone has it right after a
        ``step()``.)
        """
        return self._core.started().anchor_digest()

    # For training loops.

    @torch.inference_mode(False)
    def sync(self) -> bool:
        """Proposes a round now, with the steps at hand, and waits for it.

        Returns:
            True when everything proposed is decided; False when this replica is cut off or too few others are
            there: it keeps its steps and trains on. With `SyncSGD` and `PAFT` also when it has only taken the step
            that was outstanding, and more is pending: that is for the next call, at the rate that your loop sets then.
        """
        return self._core.sync()

    @torch.inference_mode(False)
    def settle(self) -> bool:
        """Waits until what this replica has proposed is decided, and applies it at once, whatever the ``delay``.

        Returns:
            False when something is still undecided: this replica is cut off, or too few others are there.
        """
        return self._core.settle()

    def count(self, *, tokens: int = 0, samples: int = 0, loss: float | Tensor | None = None) -> None:
        """Counts what the next ``step()`` uses; call it before that. Tokens go with the contribution.

        Args:
            tokens: added to those of earlier calls before the same step. A whole number, also of numpy, or a tensor on
                the CPU without dimensions; one on a device is refused, since reading it waits for the device.
            samples: added to those of earlier calls, too. In an island, events and metrics have the tokens and samples
                that rank 0 counts.
            loss: the step's, one number; for the live page, and for triggers that go by it
                (`ftopt.triggers.AdaComm`), whose mean leaves out what is not finite. A tensor is read later, not here:
                training does not wait for a GPU. Default: what a closure returns.

        Raises:
            UserError: a number that is negative, not whole, or above 2^53 - 1 in all; a loss that is not one number.
                Nothing is counted.
        """
        self._core.count(tokens=whole("tokens", tokens), samples=whole("samples", samples), loss=checked_loss(loss))

    @contextmanager
    def busy(self, state: str = "busy") -> Iterator[None]:
        """Says that the loop does not train: peers wait for it no longer than the grace, and do not take it for hung.

        Args:
            state: what to show in the status: ``busy``, ``evaluating``, ``checkpointing``, ``compiling``, ...
        """
        if not isinstance(state, str) or not state:
            raise UserError(f"busy({state!r:.60}); must be a word for the status, such as 'evaluating'")
        self._core.training.report(state)
        try:
            yield
        finally:
            self._core.training.report("training")

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Steps inside are the inner optimizer's alone: nothing is counted, nothing proposed.

        For code that calls ``step()`` without training. What they change in the parameters counts as pending work.
        """
        self._core.training.suspended += 1
        try:
            yield
        finally:
            self._core.training.suspended -= 1

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """The committed anchor in the model, to evaluate and export; afterwards the parameters are what they were.

        After `eval` it is there already, and stays until `train`.

        Raises:
            RuntimeError: it is there already, by another ``with``.
        """
        with torch.inference_mode(False):
            put = self._core.evaluating.enter(self._core.start)
        try:
            yield
        finally:
            if put:
                self._core.evaluating.exit()

    def eval(self) -> None:
        """Puts the committed anchor into the model until `train`: what is evaluated or saved then are the parameters
        that all replicas agree on. Trainers call both, if an optimizer has them.

        Idempotent. Nothing before the start and after `close`, where the parameters in the model are the user's own.
        Inner optimizers that have ``eval()`` and ``train()`` (schedule-free ones) are put into that mode, too; what
        they do to the parameters then takes place before the start only. In a replica of several ranks all call it.
        """
        with torch.inference_mode(False):
            self._core.evaluating.eval()

    def train(self) -> None:
        """Takes the committed anchor out of the model: the parameters are what they were, bit for bit. Idempotent, and
        costs next to nothing when it is not there."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.train()
        return self._core.evaluating.train()

    # Joining and leaving.

    @torch.inference_mode(False)
    def close(self, *, flush: bool = True, timeout_s: float = 30.0, early: bool = False) -> None:
        """Leaves the job in good order. Idempotent.

        Args:
            flush: propose the pending steps, round after round, until they are decided.
            timeout_s: seconds to wait at most, in all. The log says what is left then, and why. With a global batch
                what is proposed is waited for no longer than ``grace_s`` and ``dead_after_s``: others compute it again.
            early: this replica ends before the others: its pending steps open a round, which the others take part in
                with what they have. Default False: they wait for the round that the others open, which may be a period
                away. After a signal (``leave_on_signals``), and while an exception is raised or handled, it is True.
                Where a loss ends the job (``on_loss="fail"``), and for spares, only one that leaves early is lost, also
                with ``flush=False``.
        """
        timeout_s = check_number(
            "timeout_s", timeout_s, "[0, inf)", of="seconds", hint="use flush=False to leave at once"
        )
        self._core.leaving.close(flush=flush, timeout_s=timeout_s, early=early)

    @without_internals
    @torch.inference_mode(False)
    def __enter__(self) -> OuterOptimizer:
        """Joins the job: afterwards the parameters are the committed ones.

        Raises:
            RuntimeError: after `close`; a loop that goes by `inner_step` would take no step, and say nothing.
            ftopt.errors.Unreachable: no coordinator has answered for ``connect_s`` seconds.
            ftopt.errors.Refused: the job has refused this replica.
            ftopt.errors.UserError: a setting, or the checkpoint to resume from, does not fit.
            ftopt.errors.JobOver: this spare was not needed.
        """
        if self._core.closed:
            raise RuntimeError(
                "`with optimizer:` after close(): this replica has left the job; call ftopt.wrap() with a new group to "
                "join anew"
            )
        self._core.start()
        return self

    @torch.inference_mode(False)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves in good order; on an exception at once, without waiting for a round.

        Raises:
            SystemExit: a data loader's worker has died, and this process is asked to leave (``leave_on_signals``): the
                signal has gone to both.
        """
        if kind is not None and not issubclass(kind, Leave) and not _in_step(trace):
            self._core.leaving.if_worker_died(error)
        self._core.leaving.close(flush=kind is None or issubclass(kind, Leave), timeout_s=left_s())


def _in_step(trace: TracebackType | None) -> bool:
    """Whether an exception was raised in a step, which may be half done."""
    while trace is not None:
        if trace.tb_frame.f_code is OuterOptimizer.step.__code__:
            return True
        trace = trace.tb_next
    return False


def around(core: Core) -> OuterOptimizer:
    """The optimizer whose steps ``core`` takes."""
    found = OuterOptimizer.__new__(OuterOptimizer)
    found._set_up(core)
    return found
