"""A replica with Accelerate: accumulation, clipping and a schedule.

Started like ``examples/plain.py``; needs ``pip install -e '.[trainers]'``.
"""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from tiny import STEP_S, STEPS, SYNC_EVERY, Waves, net, score
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import ftopt


def main() -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their loss."""
    accelerator = Accelerator(cpu=True)
    bare = net()
    inner = torch.optim.AdamW(bare.parameters(), lr=2e-3)
    wrapped = ftopt.wrap(inner, bare, ftopt.DiLoCo(sync_every=SYNC_EVERY), leave_on_signals=True)
    schedule = CosineAnnealingLR(wrapped, STEPS)
    model, optimizer, scheduler = accelerator.prepare(bare, wrapped, schedule)
    batches = iter(wrapped.loader(Waves(), batch_size=8, accumulate=2, epochs=None).steps())
    with wrapped:
        for _ in wrapped.steps(STEPS):  # of the job
            micro_batches = next(batches)
            for inputs, targets in micro_batches:
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss / len(micro_batches))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"{wrapped.replica}: step {wrapped.inner_step}", flush=True)
            time.sleep(STEP_S)
    return wrapped.status.committed_step, wrapped.digest(), score(bare)


if __name__ == "__main__":
    print("step {}, digest {:.12}, loss {:.4f}".format(*main()))
