"""A replica with two inner optimizers: Muon for the matrices, AdamW for the rest.

Started like ``examples/plain.py``.
"""

from __future__ import annotations

import time

import torch
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import nn

import ftopt


def main() -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their loss."""
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    inner = [torch.optim.Muon(matrices, lr=5e-3), torch.optim.AdamW(rest, lr=2e-3)]
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=SYNC_EVERY), leave_on_signals=True)
    batches = iter(optimizer.loader(Waves(), batch_size=8, epochs=None))
    with optimizer:
        for _ in optimizer.steps(STEPS):  # of the job
            inputs, targets = next(batches)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{optimizer.replica}: step {optimizer.inner_step}", flush=True)
            time.sleep(STEP_S)
    return optimizer.status.committed_step, optimizer.digest(), score(model)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))
