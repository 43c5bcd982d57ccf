"""A replica with a schedule-free optimizer inside.

Started like ``examples/plain.py``; needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import sys
import time

from schedulefree import AdamWScheduleFree
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import nn

import ftopt
from ftopt.integrations import finish


def main(url: str | None = None) -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the outer parameters, and their loss."""
    model = net()
    group = ftopt.connect(url, sync=ftopt.Sync(start_replicas=2))
    method = ftopt.DiLoCo(sync_every=SYNC_EVERY)
    optimizer = ftopt.wrap(
        AdamWScheduleFree(model.parameters(), lr=5e-3), model, method, group=group, leave_on_signals=True
    )
    loader = ftopt.DataLoader(Waves(), batch_size=8, epochs=None, group=group)
    with optimizer:  # the inner optimizer is in train mode from here on
        for inputs, targets in loader:
            if optimizer.inner_step >= STEPS:  # before the step: a late return adds none to a finished job
                break
            optimizer.train()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{group.replica}: step {optimizer.inner_step}", flush=True)
            if optimizer.passed(every=20):
                optimizer.eval()  # the outer parameters, until the next train()
                score(model)
            time.sleep(STEP_S)
        finish(optimizer, STEPS)  # a last round: all replicas end alike
    with optimizer.outer_parameters():
        return optimizer.committed.inner_step, optimizer.anchor_digest(), score(model)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main(*sys.argv[1:])))
