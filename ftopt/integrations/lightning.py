"""Lightning's `Trainer` as a replica. (Fabric needs nothing of this: its loop is yours.)"""

from __future__ import annotations

import logging
import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ftopt.checkpoint.checkpoints import Checkpoints
from ftopt.data.loader import DataLoader
from ftopt.errors import UserError
from ftopt.integrations.membership import Membership, passed
from ftopt.optimizer import ReplicaOptimizer
from ftopt.optimizer.asked import Leave

_log = logging.getLogger(__name__)


class FtoptCallback(Callback):
    """Makes a Lightning `Trainer` a replica of a job, whose optimizer ``configure_optimizers`` wraps.

        def configure_optimizers(self):
            inner = torch.optim.AdamW(self.parameters())
            return ftopt.wrap(inner, self, ftopt.DiLoCo(sync_every=100), group=self.group)

        Trainer(max_steps=10_000, max_epochs=-1, callbacks=[FtoptCallback()]).fit(module, loader)

    It joins when the loop begins, after the trainer has loaded its own state. ``global_step``, the schedules, the end
    (``max_steps``) and the loggers' steps follow the job's inner step. If that jumps over a step at which the trainer
    logs, or a `ModelCheckpoint` saves, they do so at the next one, under the step that was due. At the end it takes
    part in a last round and leaves. SIGTERM hands in the pending steps, saves a last checkpoint, and leaves; Ctrl-C
    does so with ``ftopt.wrap(..., leave_on_signals=True)``. After another exception it leaves at once. The outer
    parameters are validated and saved. Works with automatic and manual optimization.

    Args:
        checkpoints: the folder of the job's checkpoints, shared by all replicas: resumed, and written here. Default
            None: none; the trainer's own are models to use, not the job's state.
        every: outer steps between two checkpoints. Default 5.
    """

    def __init__(self, *, checkpoints: str | None = None, every: int = 5) -> None:
        self._folder, self._every = checkpoints, every
        self._job: Membership | None = None
        self._seen = 0
        """The job's inner step at the trainer's previous step."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = [each for each in trainer.optimizers if isinstance(each, ReplicaOptimizer)]
        if len(found) != 1 or len(trainer.optimizers) != 1:
            kinds = ", ".join(type(each).__name__ for each in trainer.optimizers) or "nothing"
            raise UserError(
                f"configure_optimizers() gives {kinds}; must give one optimizer that ftopt.wrap() returned: several "
                "inner ones go into it as a list"
            )
        (optimizer,) = found
        kept = None if self._folder is None else Checkpoints(self._folder, optimizer, every=self._every)
        self._job = Membership(optimizer, kept)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        job = self._joined
        loader, fetcher = trainer.train_dataloader, trainer.fit_loop._data_fetcher
        if isinstance(loader, DataLoader):  # the trainer has drawn its first batch already
            loader.asked_ahead(getattr(fetcher, "prefetch_batches", 0) if fetcher.length is None else 0)
        job.join(_schedulers(trainer), loader, planned=trainer.max_steps)
        job.check_resumed(
            trainer.global_step,
            old="give FtoptCallback(checkpoints=folder) the folder of its checkpoints",
            new="load them into the module, and call fit() without ckpt_path",
        )
        self._follow(trainer)
        self._seen = job.step
        trainer.fit_loop.epoch_loop._batches_that_stepped = job.step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._joined.optimizer.train()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        job = self._joined
        job.follow(_schedulers(trainer))
        job.stepped()
        self._follow(trainer)
        if 0 <= trainer.max_steps <= job.step:
            self._leave(trainer)
        if trainer.fit_loop._should_accumulate():
            return
        before, self._seen = self._seen, job.step
        loop = trainer.fit_loop.epoch_loop
        # The step for loggers; the trainer adds one after this hook.
        loop._batches_that_stepped = (passed(before, job.step, trainer.log_every_n_steps) or job.step) - 1
        for each in trainer.checkpoint_callbacks:
            due = passed(before, job.step, each._every_n_train_steps) if isinstance(each, ModelCheckpoint) else 0
            if due and due != job.step:
                self._count(trainer, due)
                each.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
                self._count(trainer, job.step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader, loaded = trainer.train_dataloader, trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if isinstance(loader, DataLoader) and (loader.ended or not loaded):
            trainer.should_stop = True  # the data have ended; else it would begin endless epochs

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._job is not None:
            self._job.optimizer.eval()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._job is not None and trainer.sanity_checking:
            self._job.optimizer.train()

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if self._job is not None and not trainer.sanity_checking:
            self._job.evaluating()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the global parameters, at any time."""
        if self._job is None or self._job.over or not self._job.joined:
            return
        with self._job.optimizer.global_parameters():
            found = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {name: value.detach().clone() for name, value in found.items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._job is None:
            return
        if isinstance(exception, Leave | SIGTERMException):  # raised between two steps
            self._job.leave_at_once()
            if self._job.joined:
                self._follow(trainer)
        else:
            self._job.fail()

    @property
    def _joined(self) -> Membership:
        assert self._job is not None, "on_fit_start comes first"
        return self._job

    def _leave(self, trainer: Trainer) -> None:
        self._joined.leave(trainer.max_steps if trainer.max_steps >= 0 else sys.maxsize)
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        """Sets the trainer's count to the job's inner step."""
        self._count(trainer, self._joined.step)

    def _count(self, trainer: Trainer, step: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        automatic = trainer.lightning_module.automatic_optimization
        counted: Any = (
            loop.automatic_optimization.optim_progress.optimizer.step.total
            if automatic
            else loop.manual_optimization.optim_step_progress.total
        )
        counted.ready = counted.completed = step


def _schedulers(trainer: Trainer) -> list[Any]:
    """The schedulers that count steps; others count epochs of this process."""
    return [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
