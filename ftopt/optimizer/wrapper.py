"""`ReplicaOptimizer`: a `torch.optim.Optimizer` around the inner one. `wrap` makes it.

If user code is in `torch.inference_mode`, as around an evaluation, tensors made there would be unusable outside it, so
code that makes tensors for later use leaves that mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftopt.common.paths import user_path
from ftopt.errors import UserError, check_bool, check_number, check_whole, without_internals
from ftopt.optimizer.asked import TIMEOUT_S, Leave, left_s
from ftopt.optimizer.core import Core
from ftopt.optimizer.counts import IDLE_PASSES, SPUN_PASSES, check_idle, checked_loss, whole
from ftopt.optimizer.ending.last_round import last_round
from ftopt.optimizer.placed import Placed
from ftopt.step.tensors.flat import uncompiled

if TYPE_CHECKING:
    from ftopt.data.loader import DataLoader


class ReplicaOptimizer(Placed):
    """A `torch.optim.Optimizer` whose replica takes part in outer steps. Made by `wrap`.

    ``step()`` is the inner optimizer's step and, when the method says so, an outer step after it. All other parts of an
    optimizer (groups, state, rates, hooks, state dicts) are the inner one's.

    A deepcopy or an unpickled copy is *detached*: it steps its (copied) inner optimizer, belongs to no job, and warns
    of that at its first step.
    """

    def __init__(self) -> None:
        raise UserError("ReplicaOptimizer is made by ftopt.wrap(inner, model, method, group=group)")

    def step(
        self, closure: Callable[[], Any] | None = None, *, loss: float | Tensor | None = None, tokens: int = 0
    ) -> Any:
        """Takes one inner step; then, if it is time, takes part in an outer step.

        The first step joins the job unless ``with optimizer:`` has. If the join fetched parameters from another
        replica, the present gradient belongs to other parameters and is not applied (with a closure it is computed
        again).

        Args:
            closure: computes the loss, as for the inner optimizer.
            loss, tokens: as for `log`, in the same call.

        Returns:
            What the inner optimizer returns.

        Raises:
            RuntimeError: after `close`, or while the global parameters are in the model (`eval`, `global_parameters`).
            ftopt.errors.UserError: different parameters train than the replicas agreed on at the start
                (``docs/methods.md``).
            ftopt.errors.Refused: the job has refused this replica.
            ftopt.errors.Unreachable: this step joins the job, and no coordinator has answered for ``connect_s``.
            ftopt.errors.JobFailed: a replica was lost, with ``policy.on_loss=fail``.
            SystemExit: this process is asked to leave (``leave_on_signals``), or the torchrun that has started it is
                gone. The step is done.
            ftopt.errors.FtoptError: another thread of ftopt has failed since the last call; its error is ``__cause__``.
                `sync` and `close` raise it, too. Nothing has changed; this replica can only be closed.
        """
        if loss is not None or tokens:
            self.log(loss=loss, tokens=tokens)
        return self._step(closure)

    # Torch would wrap it, for hooks and the profiler, at twice the cost of all work here.
    step.hooked = True  # type: ignore[attr-defined]

    def steps(self, planned: int) -> Iterator[int]:
        """A loop over the job's inner steps, from where the job is to ``planned``.

            with optimizer:
                for step in optimizer.steps(10_000):
                    loss = ...
                    loss.backward()
                    optimizer.step(loss=loss)
                    optimizer.zero_grad()

        Each pass of the loop takes one inner step, or none. The loop joins the job, if ``with optimizer:`` has not, so
        that a replica that comes late begins at the job's present step. It ends when the job has come to ``planned``
        steps, or was stopped (`stop`): it then takes part in a last round, with which all replicas get the same
        parameters, and leaves the job. Afterwards the model has these parameters, or, if no coordinator answers, those
        of this replica, with all its steps. A loop that you end by ``break`` or
        an exception does none of that; ``with optimizer:`` leaves the job then.

        The job may end beyond ``planned``, by less than one outer round, as after a late joiner: a version counts the
        longest contribution, which may hold steps that the version before has not taken.

        Args:
            planned: inner steps of the whole job, not of this process.

        Yields:
            `inner_step`, from which schedules and periodic actions go. It may jump (see `passed`).

        Raises:
            UserError: ``planned`` is not a whole number of 1 or more; 100,000 passes in a row have not called `step`,
                in less than a millisecond each.
            RuntimeError: this replica has left the job before.
        """
        planned = check_whole("planned", planned, 1, of="inner steps", hint="use optimizer.steps(10_000)")
        return self._steps(planned)

    def _steps(self, planned: int) -> Iterator[int]:
        self._core.joining.warn(planned)
        if not self._core.standing().started:
            self.__enter__()
        self._core.started().counters.plan(planned)
        idle, taken, since_s = 0, self.local_steps, time.monotonic()
        while self.inner_step < planned and not self.stopped:
            idle += 1
            if idle == IDLE_PASSES or not idle % SPUN_PASSES:
                if self.local_steps == taken:
                    check_idle(idle, planned, time.monotonic() - since_s)
                    since_s = since_s if idle == IDLE_PASSES else time.monotonic()
                else:
                    idle, taken, since_s = 0, self.local_steps, time.monotonic()
            if self._core.closed:
                raise RuntimeError(
                    f"steps({planned}) after close(): this replica has left the job at inner step {self.inner_step}; "
                    "call ftopt.wrap() with a new group to join anew"
                )
            yield self.inner_step
        if self._core.closed:
            return
        self.train()
        with torch.inference_mode(False):
            self._core.leaving.close(flush=True, timeout_s=TIMEOUT_S, offer=last_round(self, planned))
            if not self._core.leaving.is_apart:
                self._core.evaluating.keep()

    def loader(self, dataset: Any, batch_size: int = 1, **settings: Any) -> DataLoader:
        """The job's data: `ftopt.DataLoader` with this replica's group and these ``settings``. Make it before the
        replica joins."""
        from ftopt.data.loader import DataLoader  # it imports torch's loader, which is slow

        return DataLoader(dataset, batch_size, group=self._core.group, **settings)

    def export(self, path: str | Path) -> None:
        """Writes the global parameters, and the model's buffers, as a plain state dict, with the names from before
        `torch.compile`. Replaces a file that is there, in one step, so that several replicas may write the same one.

        In a replica of several ranks all ranks call it. They gather tensors that are divided among them (FSDP2, tensor
        parallel) one at a time, and rank 0, which holds the whole model on its CPU meanwhile, writes. If only some
        ranks call it, the island ends with an error at the others' next call, or, once the replica has left its job,
        when they end.

        Args:
            path: ends with ``.safetensors``, or ``.pt`` or ``.pth`` for `torch.load` with ``weights_only=True``.

        Raises:
            UserError: another ending; the file cannot be written, or cannot hold one of the tensors. On all ranks.
            RuntimeError: before the start, or of a detached copy.
        """
        from ftopt.checkpoint.export import check_target, write

        target, core = user_path(path), self._core
        check_target(target, force=True)
        if core.model is None or not core.standing().started:
            raise RuntimeError("not started: use `with optimizer:`, or take a first step")
        with core.ranks.call("export"), nullcontext() if core.evaluating.there else self.global_parameters():
            tensors = {uncompiled(name): value for name, value in core.model.state_dict().items()}
            if core.ranks.size > 1:
                from ftopt.optimizer.ranks.parts import whole_tensors  # it imports torch.distributed.tensor

                tensors = whole_tensors(tensors, keep=core.ranks.rank == 0)
            core.ranks.lead("export", lambda: write(tensors, target, version=self.version))

    # For training loops.

    @torch.inference_mode(False)
    def sync(self, *, propose: bool = True) -> bool:
        """Proposes a round now, with the pending steps, waits for it, and applies the results at once, whatever the
        ``delay``.

        Args:
            propose: False: only waits until this replica's proposals are decided, and applies the results.

        Returns:
            True if everything proposed is decided; False if this replica is cut off or too few others are present: it
            keeps its steps and trains on. With `SyncSGD` and `PAFT` also False if it has only taken the outstanding
            step, and more is pending, for the next call, at the rate that your loop sets then.
        """
        return self._core.sync() if check_bool("propose", propose) else self._core.settle()

    def log(self, *, tokens: int = 0, samples: int = 0, loss: float | Tensor | None = None) -> None:
        """Records the data of the next ``step()``; call it before that. Tokens are part of the contribution.

        Args:
            tokens: added to those of earlier calls before the same step. A whole number, also of numpy, or a tensor
                without dimensions on the CPU; a tensor on a device is refused, since reading it would wait for the
                device.
            samples: added to those of earlier calls, too. In an island, events and metrics show rank 0's counts of
                tokens and samples.
            loss: the step's loss, one number; for the live page, and for triggers that use it
                (`ftopt.triggers.AdaComm`), whose mean leaves out values that are not finite. A tensor is read later, so
                that training does not wait for a GPU. Default: a closure's result.

        Raises:
            UserError: a number that is negative, not whole, or above 2^53 - 1 in all; a loss that is not one number.
                Nothing is recorded.
        """
        self._core.count(tokens=whole("tokens", tokens), samples=whole("samples", samples), loss=checked_loss(loss))

    @contextmanager
    def busy(self, state: str = "busy") -> Iterator[None]:
        """Reports that the loop does not train: peers wait for it no longer than the grace, and do not consider it
        hung.

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
        """Makes steps inside the block the inner optimizer's alone, neither counted nor proposed.

        For code that calls ``step()`` without training. Their changes to the parameters count as pending work.
        """
        self._core.training.suspended += 1
        try:
            yield
        finally:
            self._core.training.suspended -= 1

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Puts the committed anchor into the model, to evaluate and export; afterwards restores the parameters.

        After `eval` the anchor is there already, and stays until `train`.

        Raises:
            RuntimeError: another ``with`` has put the anchor there already.
        """
        with torch.inference_mode(False):
            put = self._core.evaluating.enter(self._core.start)
        try:
            yield
        finally:
            if put:
                self._core.evaluating.exit()

    def eval(self) -> None:
        """Puts the committed anchor into the model until `train`, to evaluate or save the parameters on which all
        replicas agree. Trainers call both methods of optimizers that have them.

        Idempotent. Does nothing before the start and after `close`, when the parameters in the model are the user's
        own. Inner optimizers that have ``eval()`` and ``train()`` (schedule-free ones) enter that mode, too; they
        change the parameters only before the start. In a replica of several ranks all ranks call it.
        """
        with torch.inference_mode(False):
            self._core.evaluating.eval()

    def train(self) -> None:
        """Takes the committed anchor out of the model and restores the parameters, bit for bit. Idempotent, and nearly
        free when the anchor is not there."""
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
            timeout_s: maximum seconds to wait in all. The log says which steps are left then, and why. With a global
                batch, the wait for a proposal is at most ``grace_s`` plus ``dead_after_s``: others compute it again.
            early: this replica ends before the others, and its pending steps open a round, in which the others take
                part with the steps that they have. Default False: they wait for the others' next round, which may be a
                period away. After a signal (``leave_on_signals``), and while an exception is raised or handled, it is
                True. If a loss ends the job (``on_loss="fail"``), and for spares, only a replica that leaves early
                counts as lost, also with ``flush=False``.
        """
        timeout_s = check_number(
            "timeout_s", timeout_s, "[0, inf)", of="seconds", hint="use flush=False to leave at once"
        )
        flush, early = check_bool("flush", flush), check_bool("early", early)
        self._core.leaving.close(flush=flush, timeout_s=timeout_s, early=early)

    @without_internals
    @torch.inference_mode(False)
    def __enter__(self) -> ReplicaOptimizer:
        """Joins the job: afterwards the parameters are the committed ones.

        Raises:
            RuntimeError: after `close`; a loop over `inner_step` would silently take no step.
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
            SystemExit: a data loader's worker has died, and this process is asked to leave (``leave_on_signals``): both
                got the signal.
        """
        if kind is not None and not issubclass(kind, Leave) and not _in_step(trace):
            self._core.leaving.if_worker_died(error)
        self._core.leaving.close(flush=kind is None or issubclass(kind, Leave), timeout_s=left_s())


def _in_step(trace: TracebackType | None) -> bool:
    """Whether an exception was raised within a step, which may be half done."""
    while trace is not None:
        if trace.tb_frame.f_code is ReplicaOptimizer.step.__code__:
            return True
        trace = trace.tb_next
    return False


def around(core: Core) -> ReplicaOptimizer:
    """The optimizer whose steps ``core`` takes."""
    found = ReplicaOptimizer.__new__(ReplicaOptimizer)
    found._set_up(core)
    return found
