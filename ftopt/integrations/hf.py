"""Hugging Face's `transformers.Trainer` as a replica."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ftopt.checkpoint.checkpoints import Checkpoints
from ftopt.data.loader import DataLoader
from ftopt.errors import UserError
from ftopt.integrations.membership import Membership, passed
from ftopt.optimizer import ReplicaOptimizer

_log = logging.getLogger(__name__)

_LEAST_STEPS = 0.001
"""Lower bound of the trainer's divisor: the job's step may be below the one at which the trainer has resumed."""


class FtoptCallback(TrainerCallback):
    """Makes a `transformers.Trainer` a replica of a job.

        optimizer = ftopt.wrap(AdamW(model.parameters()), model, ftopt.DiLoCo(sync_every=100), group=group)
        trainer = Trainer(model, args, optimizers=(optimizer, None), callbacks=[FtoptCallback(optimizer)], ...)
        trainer.train()

    It joins when training begins, after the trainer has loaded its own state. ``state.global_step``, the schedule and
    the end (``max_steps``) follow the job's inner step. At the end it takes part in a last round and leaves, before the
    last evaluation and save, and before the best model is loaded. The trainer evaluates and saves the global
    parameters. If the inner step jumps over a step at which the trainer logs, evaluates or saves, the trainer does so
    at the next one. With ``ftopt.wrap(..., leave_on_signals=True)`` SIGTERM and Ctrl-C hand in the pending steps, save
    a last checkpoint, and leave the job, before `SystemExit` ends ``train()``.

    Within ``with optimizer:`` it neither joins nor leaves, for several calls of ``train()``.

    Args:
        optimizer: the optimizer that `ftopt.wrap` returned.
        checkpoints: ``ftopt.Checkpoints(folder, optimizer)``: the job's checkpoints, which it resumes, extends and
            writes. Default None: none; the trainer's own are models to use, not the job's state.

    Raises:
        UserError: an argument has the wrong type. When training begins: the trainer steps another optimizer, or
            trains another model.
    """

    def __init__(self, optimizer: ReplicaOptimizer, *, checkpoints: Checkpoints | None = None) -> None:
        self._job = Membership(optimizer, checkpoints)
        self._steps = self._logged = self._base = self._begin = self._seen = 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        lr_scheduler: Any = None,
        train_dataloader: object = None,
        optimizer: Any = None,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        self._check_trained(optimizer, model)
        self._steps = self._logged = 0
        self._base = self._begin = state.global_step
        self._job.join([] if lr_scheduler is None else [lr_scheduler], train_dataloader, planned=state.max_steps)
        self._job.check_resumed(
            state.global_step,
            old="give FtoptCallback(checkpoints=ftopt.Checkpoints(folder, optimizer)) the folder of its checkpoints",
            new="load them into the model, and call train() without resume_from_checkpoint, with another output_dir",
        )
        if isinstance(train_dataloader, DataLoader):
            args.ignore_data_skip = True  # the job's ledger knows the position
        self._follow(state, control)
        self._seen = state.global_step
        self._settle(state, control)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        """Makes the trainer's next step do nothing after this replica has left the job."""
        if self._job.over:
            model.zero_grad()
            self._job.optimizer._core.training.suspended += 1

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._job.over:
            self._job.optimizer._core.training.suspended -= 1

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        self._steps += 1
        if not self._job.over:
            self._job.follow([] if lr_scheduler is None else [lr_scheduler])
            self._job.stepped()
        self._follow(state, control)
        _make_up(args, state, control, self._seen)
        self._seen = state.global_step
        self._settle(state, control)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._job.evaluating()

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Any,
        lr_scheduler: Any = None,
        train_dataloader: object = None,
        **_: Any,
    ) -> None:
        if not self._job.over and any(p.grad is not None for p in model.parameters()):
            # A loader without a length has ended within a step, whose micro-batches the trainer would discard.
            optimizer.gradient_state._set_sync_gradients(True)
            if args.max_grad_norm > 0:
                if optimizer.scaler is not None:
                    optimizer.scaler.unscale_(optimizer.optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            model.zero_grad()
            self.on_step_end(args, state, control, lr_scheduler=lr_scheduler)
        if isinstance(train_dataloader, DataLoader) and train_dataloader.ended:
            control.should_training_stop = True  # else it would begin one more epoch, without a batch
        self._settle(state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any],
        **_: Any,
    ) -> None:
        """Corrects losses: the trainer divides them by the growth of ``global_step``, not by the steps taken here. The
        logged loss counts as the next step's, since callbacks get no other."""
        for name, begin, steps in (
            ("loss", self._base, self._steps - self._logged),
            ("train_loss", self._begin, self._steps),
        ):
            if name in logs and steps:
                factor = max(state.global_step - begin, _LEAST_STEPS) / steps
                for told in (logs, state.log_history[-1]):
                    told[name] *= factor
        if "loss" in logs:
            self._base, self._logged = state.global_step, self._steps
            if not self._job.over:
                self._job.optimizer.log(loss=logs["loss"])
        if "train_runtime" in logs:  # the last event before the best model is loaded
            self._leave(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._leave(state)
        if state.global_step < state.max_steps:
            _log.warning("the trainer has ended at step %d of the job's %d", state.global_step, state.max_steps)

    def _check_trained(self, optimizer: Any, model: nn.Module | None) -> None:
        """Raises UserError if the trainer steps another optimizer, or trains another model, which would not reach the
        job."""
        ours = self._job.optimizer
        bare = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if bare is not None and bare is not ours and optimizer is not ours:
            raise UserError(
                f"the trainer's optimizer, of type {type(bare).__name__}, is not the one of FtoptCallback; give both "
                "the one that ftopt.wrap() returned: Trainer(..., optimizers=(optimizer, None), "
                "callbacks=[FtoptCallback(optimizer)])"
            )
        own = {id(parameter) for group in ours.param_groups for parameter in group["params"]}
        if model is not None and not any(id(parameter) in own for parameter in model.parameters()):
            raise UserError(
                "the trainer's model has no parameter of the optimizer that ftopt.wrap() returned: it was made for "
                "another model; make the model first, then the optimizer, then the trainer, from the same model"
            )

    def _follow(self, state: TrainerState, control: TrainerControl) -> None:
        state.global_step = self._job.step
        if state.global_step >= state.max_steps:
            control.should_training_stop = True

    def _settle(self, state: TrainerState, control: TrainerControl) -> None:
        """Puts the global parameters into the model for the next evaluation and save; at the end, leaves the job
        first."""
        if control.should_training_stop:
            self._leave(state)
        elif control.should_save:
            self._job.optimizer.eval()

    def _leave(self, state: TrainerState) -> None:
        self._job.leave(state.max_steps)
        state.global_step = self._job.step


def _make_up(args: TrainingArguments, state: TrainerState, control: TrainerControl, before: int) -> None:
    """Requests what is due at steps that the job has passed since ``before``, and at its end: the trainer has only
    checked the step after ``before``."""
    now, end = state.global_step, state.global_step >= state.max_steps
    if args.logging_strategy == IntervalStrategy.STEPS and passed(before, now, state.logging_steps):
        control.should_log = True
    evaluates = args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= now
    if evaluates and (end or passed(before, now, state.eval_steps)):
        control.should_evaluate = True
    if args.save_strategy == SaveStrategy.STEPS and (end or passed(before, now, state.save_steps)):
        control.should_save = True
