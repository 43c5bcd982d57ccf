"""A global batch in a plain loop: each step is of the same 48 samples, whichever replicas are there to compute them.

Start three replicas::

    MICRO_BATCH_S=0.3 ftopt launch -n 3 examples/global_batch.py

Kill one with ``kill -9``: the others keep the gradients that they have, compute what it had of its batch, and go on;
it is started again. ``MICRO_BATCH_S``: seconds to wait after each micro-batch (default: 0.02).
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

import ftopt

MICRO_BATCH_S = float(os.environ.get("MICRO_BATCH_S", "0.02"))


class Waves:
    """The data: anything with ``len()`` and ``[index]``. What one replica cannot finish, another one asks for."""

    random = False  # no random numbers are drawn for a sample

    def __len__(self) -> int:
        return 4_800

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(0, 1, 16) * (1 + index % 97) + index / 50
        return x.sin(), x[-1:].cos()


def main(epochs: int = 2) -> float:
    """Trains one replica; returns the loss at the end, which is the same on all replicas."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = ftopt.wrap(inner, model, ftopt.SyncSGD(clip_norm=1.0), leave_on_signals=True)
    data = Waves()
    loader = optimizer.loader(data, batch_size=8, global_batch=48, split=4, epochs=epochs)
    with optimizer:
        for micro_batches in loader.global_batches():
            for inputs, targets in micro_batches:  # this replica's, then those that it inherits
                nn.functional.mse_loss(model(inputs), targets).backward()
                time.sleep(MICRO_BATCH_S)
            optimizer.step()
            if optimizer.passed(every=20):
                print(f"{optimizer.replica}: step {optimizer.inner_step}", flush=True)
    inputs, targets = map(torch.stack, zip(*(data[index] for index in range(200)), strict=True))
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(inputs), targets))


if __name__ == "__main__":
    print(f"loss {main():.6f}")
