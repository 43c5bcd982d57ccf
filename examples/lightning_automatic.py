"""A replica with Lightning's `Trainer`, automatic optimization: accumulation, clipping, a schedule, validation.

Started like ``examples/plain.py``; needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import Tensor, nn
from torch.utils import data

import ftopt
from ftopt.integrations.lightning import FtoptCallback


class Module(LightningModule):
    """The model, whose optimizer is wrapped."""

    def __init__(self, group: ftopt.ReplicaGroup) -> None:
        super().__init__()
        self.net, self.group = net(), group

    def configure_optimizers(self) -> Any:
        inner = torch.optim.AdamW(self.parameters(), lr=2e-3)
        self.optimizer = ftopt.wrap(
            inner, self, ftopt.DiLoCo(sync_every=SYNC_EVERY), group=self.group, leave_on_signals=True
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        return [self.optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_train_batch_end(self, *_: Any) -> None:
        print(f"{self.group.replica}: step {self.trainer.global_step}", flush=True)
        time.sleep(STEP_S / 2)


def main() -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their loss."""
    group = ftopt.connect()  # the job that `ftopt launch` has started
    module = Module(group)
    loader = ftopt.DataLoader(Waves(), batch_size=8, epochs=None, group=group)
    trainer = Trainer(
        max_steps=STEPS,  # of the job
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=40,
        accelerator="cpu",
        callbacks=[FtoptCallback()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, data.DataLoader(Waves(64), batch_size=32))
    return trainer.global_step, module.optimizer.digest(), score(module.net)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))
