"""A model that FSDP2 has spread over one rank: trains, is saved, and goes on; prints what comes of it.

``python -m tests.island.one_rank FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftopt
from ftopt.methods import Method

METHODS: tuple[Method, ...] = (
    ftopt.SyncSGD(), ftopt.DiLoCo(sync_every=2), ftopt.SlowMo(sync_every=2, inner_state="average"),
)  # fmt: skip


def train(method: Method, steps: int, folder: Path, *, resumes: bool = False) -> str:
    """The anchor's digest after ``steps``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = ftopt.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, method, group=ftopt.solo())
    checkpoints = ftopt.Checkpoints(folder, optimizer, every=100)
    if resumes:
        checkpoints.resume(folder)
    with optimizer:
        checkpoints.include()
        for _ in range(steps):
            optimizer.zero_grad()
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(optimizer.inner_step))
            model(inputs).square().mean().backward()
            optimizer.step()
            checkpoints.step()
        checkpoints.last()
        digest = optimizer.digest()
    checkpoints.close()
    return digest


def main(folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    for method in METHODS:
        whole = train(method, 8, folder / f"{method.name}-whole")
        train(method, 4, folder / f"{method.name}-halves")
        print(method.name, whole == train(method, 4, folder / f"{method.name}-halves", resumes=True))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
