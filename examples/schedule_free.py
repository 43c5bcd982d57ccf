"""A replica with a schedule-free optimizer inside.

Started like ``examples/plain.py``; needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import time

from schedulefree import AdamWScheduleFree
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import nn

import ftopt


def main() -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their loss."""
    model = net()
    inner = AdamWScheduleFree(model.parameters(), lr=5e-3)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=SYNC_EVERY), leave_on_signals=True)
    batches = iter(optimizer.loader(Waves(), batch_size=8, epochs=None))
    with optimizer:  # the inner optimizer is in train mode from here on
        for _ in optimizer.steps(STEPS):  # of the job
            inputs, targets = next(batches)
            optimizer.train()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{optimizer.replica}: step {optimizer.inner_step}", flush=True)
            if optimizer.passed(every=20):
                optimizer.eval()  # the global parameters, until the next train()
                score(model)
            time.sleep(STEP_S)
    return optimizer.status.committed_step, optimizer.digest(), score(model)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))
