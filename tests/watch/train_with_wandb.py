"""A small training script with `ftopt.Wandb`, to be killed: FOLDER STEPS."""

import logging
import sys
import time
from pathlib import Path

import torch
from torch import nn

import ftopt

logging.basicConfig(format="%(levelname)s %(message)s")
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
config = {"lr": 0.1, "path": Path("/x")}
wandb = ftopt.Wandb(project="tried", mode="offline", dir=folder, settings={"run_tags": ["a", "b"]}, config=config)
model = nn.Linear(16, 4)
optimizer = ftopt.wrap(
    torch.optim.SGD(model.parameters(), lr=0.1),
    model,
    ftopt.DiLoCo(sync_every=5),
    group=ftopt.solo(on_event=[wandb, lambda event: None]),
)
with optimizer:
    for step in range(1, steps + 1):
        (model(torch.randn(8, 16)) ** 2).mean().backward()
        optimizer.log(tokens=7, loss=torch.tensor(float(step)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 20:
            wandb.log({"mine": 42})
        if step % 100 == 0:
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
        if steps > 100:
            time.sleep(0.01)
wandb.close(timeout_s=180.0)
