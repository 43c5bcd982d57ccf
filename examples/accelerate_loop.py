"""A replica with Accelerate: accumulation, clipping and a schedule.

Started like ``examples/plain.py``; needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import sys
import time

import torch
from accelerate import Accelerator
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import ftopt
from ftopt.integrations import finish


def main(url: str | None = None) -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the outer parameters, and their loss."""
    accelerator = Accelerator(cpu=True)
    bare = net()
    group = ftopt.connect(url, sync=ftopt.Sync(start_replicas=2))
    method = ftopt.DiLoCo(sync_every=SYNC_EVERY)
    outer = ftopt.wrap(torch.optim.AdamW(bare.parameters(), lr=2e-3), bare, method, group=group, leave_on_signals=True)
    schedule = CosineAnnealingLR(outer, STEPS)
    model, optimizer, scheduler = accelerator.prepare(bare, outer, schedule)
    loader = ftopt.DataLoader(Waves(), batch_size=8, accumulate=2, epochs=None, group=group)
    with outer:
        for micro_batches in loader.steps():
            if outer.inner_step >= STEPS:  # before the step: a late return adds none to a finished job
                break
            for inputs, targets in micro_batches:
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss / len(micro_batches))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"{group.replica}: step {outer.inner_step}", flush=True)
            time.sleep(STEP_S)
        finish(outer, STEPS)  # a last round: all replicas end alike
    with outer.outer_parameters():
        return outer.committed.inner_step, outer.anchor_digest(), score(accelerator.unwrap_model(model))


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main(*sys.argv[1:])))
