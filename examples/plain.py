"""A replica with a plain loop.

Start two of them::

    STEP_S=0.6 ftopt launch -n 2 examples/plain.py

Kill one with ``kill -9``: it is started again, and goes on where the job is. ``STEP_S``: seconds to wait after each
step, so that there is time for that; with a trainer that takes long to import give 2. ``ftopt launch
--join URL examples/plain.py`` adds a replica to the job at URL. All examples of trainers are started like this one.
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
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=SYNC_EVERY), leave_on_signals=True)
    batches = iter(optimizer.loader(Waves(), batch_size=8, epochs=None))
    with optimizer:
        for _ in optimizer.steps(STEPS):  # of the job
            inputs, targets = next(batches)
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step(loss=loss)  # the loss is for the live page
            optimizer.zero_grad()
            print(f"{optimizer.replica}: step {optimizer.inner_step}", flush=True)
            time.sleep(STEP_S)
    return optimizer.status.committed_step, optimizer.digest(), score(model)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))
