"""Lightning's `Trainer` as a replica. (Fabric needs nothing of this: its loop is yours.)"""

from __future__ import annotations

import logging
import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ftopt.checkpointing import Checkpoints
from ftopt.data.loader import DataLoader
from ftopt.errors import UserError
from ftopt.integrations.membership import Membership
from ftopt.optimizer import OuterOptimizer

_log = logging.getLogger(__name__)


class FtoptCallback(Callback):
    """Makes a Lightning `Trainer` a replica of a job, whose optimizer ``configure_optimizers`` wraps. ::

        def configure_optimizers(self):
            inner = torch.optim.AdamW(self.parameters())
            return ftopt.wrap(inner, self, ftopt.DiLoCo(sync_every=100), group=self.group)

        Trainer(max_steps=10_000, max_epochs=-1, callbacks=[FtoptCallback()]).fit(module, loader)

    It joins when the loop begins, after the trainer's own loads. ``global_step``, the schedules and the end
    (``max_steps``) go by the job's inner step. At the end it takes part in a last round and leaves; after an exception
    it leaves at once. What is validated and saved are the outer parameters. Automatic and manual optimization.

    Args:
        checkpoints: the folder of the job's checkpoints, which all replicas see: resumed, and written here. Default
            None: none; the trainer's own are models to use, and not the job's state.
        every: outer steps from one to the next. Default 5.
    """

    def __init__(self, *, checkpoints: str | None = None, every: int = 5) -> None:
        self._folder, self._every = checkpoints, every
        self._job: Membership | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = [each for each in trainer.optimizers if isinstance(each, OuterOptimizer)]
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
        if trainer.global_step > job.optimizer.inner_step:
            _log.warning(
                "the trainer resumes at step %d, and the job stands at step %d, by which training goes: a new job "
                "starts from the loaded weights; to go on with a job after all its replicas have ended, give "
                "FtoptCallback(checkpoints=folder)",
                trainer.global_step,
                job.optimizer.inner_step,
            )
        loader, fetcher = trainer.train_dataloader, trainer.fit_loop._data_fetcher
        if isinstance(loader, DataLoader):  # its first batch is out already
            loader.asked_ahead(getattr(fetcher, "prefetch_batches", 0) if fetcher.length is None else 0)
        job.join(_schedulers(trainer), loader)
        self._follow(trainer)

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

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader, loaded = trainer.train_dataloader, trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if isinstance(loader, DataLoader) and (loader.ended or not loaded):
            trainer.should_stop = True  # the data have ended; else it would begin epoch after epoch

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._job is not None:
            self._job.optimizer.eval()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._job is not None and trainer.sanity_checking:
            self._job.optimizer.train()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Whenever it is saved, the model has the outer parameters."""
        if self._job is None or self._job.over or not self._job.optimizer._core.standing().started:
            return
        with self._job.optimizer.outer_parameters():
            found = trainer.strategy.lightning_module_state_dict()
            checkpoint["state_dict"] = {name: value.detach().clone() for name, value in found.items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._job is not None and self._job.ours:
            self._job.optimizer.close(flush=False, early=True)

    @property
    def _joined(self) -> Membership:
        assert self._job is not None, "on_fit_start comes first"
        return self._job

    def _leave(self, trainer: Trainer) -> None:
        self._joined.leave(trainer.max_steps if trainer.max_steps >= 0 else sys.maxsize)
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        """The trainer counts from the job's inner step on."""
        loop = trainer.fit_loop.epoch_loop
        automatic = trainer.lightning_module.automatic_optimization
        counted: Any = (
            loop.automatic_optimization.optim_progress.optimizer.step.total
            if automatic
            else loop.manual_optimization.optim_step_progress.total
        )
        counted.ready = counted.completed = self._joined.step


def _schedulers(trainer: Trainer) -> list[Any]:
    """Those that count steps; others count epochs of this process."""
    return [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
