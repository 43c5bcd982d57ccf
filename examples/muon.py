"""A replica with two inner optimizers: Muon for the matrices, AdamW for the rest.

Started like ``examples/plain.py``.
"""

from __future__ import annotations

import sys
import time

import torch
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import nn

import ftopt
from ftopt.integrations import finish


def main(url: str | None = None) -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the outer parameters, and their loss."""
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    inner = [torch.optim.Muon(matrices, lr=5e-3), torch.optim.AdamW(rest, lr=2e-3)]
    group = ftopt.connect(url, sync=ftopt.Sync(start_replicas=2))
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=SYNC_EVERY), group=group, leave_on_signals=True)
    loader = ftopt.DataLoader(Waves(), batch_size=8, epochs=None, group=group)
    with optimizer:
        for inputs, targets in loader:
            if optimizer.inner_step >= STEPS:  # before the step: a late return adds none to a finished job
                break
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{group.replica}: step {optimizer.inner_step}", flush=True)
            time.sleep(STEP_S)
        finish(optimizer, STEPS)  # a last round: all replicas end alike
    with optimizer.outer_parameters():
        return optimizer.committed.inner_step, optimizer.anchor_digest(), score(model)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main(*sys.argv[1:])))
