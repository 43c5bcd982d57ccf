"""A replica with a plain loop.

Start two of them::

    STEP_S=0.6 ftopt launch -n 2 examples/plain.py

Kill one with ``kill -9``: it is started again, and goes on where the job is. ``STEP_S``: seconds to wait after each
step, so that there is time for that; with a trainer that takes long to import give 2. ``python examples/plain.py URL``
is one replica more, of the job at URL. All examples of trainers are started like this one.
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
    group = ftopt.connect(url, sync=ftopt.Sync(start_replicas=2))
    method = ftopt.DiLoCo(sync_every=SYNC_EVERY)
    optimizer = ftopt.wrap(
        torch.optim.AdamW(model.parameters(), lr=2e-3), model, method, group=group, leave_on_signals=True
    )
    loader = ftopt.DataLoader(Waves(), batch_size=8, epochs=None, group=group)
    with optimizer:
        for inputs, targets in loader:
            if optimizer.inner_step >= STEPS:  # before the step: a late return adds none to a finished job
                break
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.count(loss=loss)  # for the live page
            optimizer.step()
            optimizer.zero_grad()
            print(f"{group.replica}: step {optimizer.inner_step}", flush=True)
            time.sleep(STEP_S)
        finish(optimizer, STEPS)  # a last round: all replicas end alike
    with optimizer.outer_parameters():
        return optimizer.committed.inner_step, optimizer.anchor_digest(), score(model)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main(*sys.argv[1:])))
