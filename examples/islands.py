"""Two islands of GPUs, or of processes on a laptop: FSDP2 within each, DiLoCo between them.

On one machine::

    ftopt launch -n 2 --ranks 2 examples/islands.py

By hand, start ``ftopt coordinator --new`` in one terminal and an island in each of two others::

    export FTOPT_COORDINATOR=http://127.0.0.1:29410 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    FTOPT_REPLICA=r0 torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/islands.py
    FTOPT_REPLICA=r1 torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/islands.py

Kill any rank with ``kill -9``: its island is started again, fetches the state and goes on; the other island loses
nothing.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftopt

STEPS, STEP_S = 300, 0.02
"""So that there is time to kill a rank."""


class Waves:
    """The data: anything with ``len()`` and ``[index]``."""

    random = False  # no random numbers are drawn for a sample

    def __len__(self) -> int:
        return 16 * STEPS * 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(0, 1, 16) * (1 + index % 97) + index / 50
        return x.sin(), x[-1:].cos()


def main() -> None:
    """One rank of an island."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=20), leave_on_signals=True)
    loader = optimizer.loader(Waves(), batch_size=16)  # 8 samples for each of 2 ranks
    with optimizer:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step(loss=loss)  # rank 0's loss is for the live page
            if dist.get_rank() == 0 and optimizer.passed(every=20):
                print(f"{optimizer.replica}: step {optimizer.inner_step}, loss {float(loss.detach()):.4f}", flush=True)
            time.sleep(STEP_S)
    if dist.get_rank() == 0:
        print(f"{optimizer.replica}: digest {optimizer.digest()[:12]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
