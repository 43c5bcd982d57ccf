"""A replica with Lightning's `Trainer`, manual optimization.

Started like ``examples/plain.py``; needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import Tensor, nn

import ftopt
from ftopt.integrations.lightning import FtoptCallback


class Module(LightningModule):
    """The model, whose optimizer is wrapped."""

    automatic_optimization = False

    def __init__(self, group: ftopt.ReplicaGroup) -> None:
        super().__init__()
        self.net, self.group = net(), group
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        inner = torch.optim.AdamW(self.parameters(), lr=2e-3)
        self.optimizer = ftopt.wrap(
            inner, self, ftopt.DiLoCo(sync_every=SYNC_EVERY), group=self.group, leave_on_signals=True
        )
        return self.optimizer

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        optimizer.zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        print(f"{self.group.replica}: step {self.trainer.global_step}", flush=True)
        time.sleep(STEP_S)


def main() -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their loss."""
    group = ftopt.connect()  # the job that `ftopt launch` has started
    module = Module(group)
    loader = ftopt.DataLoader(Waves(), batch_size=8, epochs=None, group=group)
    trainer = Trainer(
        max_steps=STEPS,  # of the job
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[FtoptCallback()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return trainer.global_step, module.optimizer.digest(), score(module.net)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))
