"""A replica with Lightning Fabric, in bf16: the loop is yours, and needs no callback.

Started like ``examples/plain.py``; needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import time

import torch
from lightning.fabric import Fabric
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import nn

import ftopt


def main() -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their loss."""
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    bare = net()
    inner = torch.optim.AdamW(bare.parameters(), lr=2e-3)
    wrapped = ftopt.wrap(inner, bare, ftopt.DiLoCo(sync_every=SYNC_EVERY), leave_on_signals=True)
    model, optimizer = fabric.setup(bare, wrapped)
    batches = iter(wrapped.loader(Waves(), batch_size=8, epochs=None))  # not for setup_dataloaders()
    with wrapped:
        for _ in wrapped.steps(STEPS):  # of the job
            inputs, targets = fabric.to_device(next(batches))
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"{wrapped.replica}: step {wrapped.inner_step}", flush=True)
            time.sleep(STEP_S)
    return wrapped.status.committed_step, wrapped.digest(), score(bare)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))
