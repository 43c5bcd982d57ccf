"""A replica with Lightning Fabric, in bf16: the loop is yours, and needs no callback.

Started like ``examples/plain.py``; needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import sys
import time

import torch
from lightning.fabric import Fabric
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import nn

import ftopt
from ftopt.integrations import finish


def main(url: str | None = None) -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the outer parameters, and their loss."""
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    bare = net()
    group = ftopt.connect(url, sync=ftopt.Sync(start_replicas=2))
    method = ftopt.DiLoCo(sync_every=SYNC_EVERY)
    outer = ftopt.wrap(torch.optim.AdamW(bare.parameters(), lr=2e-3), bare, method, group=group, leave_on_signals=True)
    model, optimizer = fabric.setup(bare, outer)
    loader = ftopt.DataLoader(Waves(), batch_size=8, epochs=None, group=group)  # not for setup_dataloaders()
    with outer:
        for batch in loader:
            if outer.inner_step >= STEPS:  # before the step: a late return adds none to a finished job
                break
            inputs, targets = fabric.to_device(batch)
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"{group.replica}: step {outer.inner_step}", flush=True)
            time.sleep(STEP_S)
        finish(outer, STEPS)  # a last round: all replicas end alike
    with outer.outer_parameters():
        return outer.committed.inner_step, outer.anchor_digest(), score(bare)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main(*sys.argv[1:])))
