"""An island's rank that trains on a loader's units and notes which samples it has seen; run by torchrun.

``python -m tests.island.reading FOLDER``; a line of samples for each batch, in ``FOLDER/<replica>.<rank>``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ftopt

SAMPLES = 96


def main(folder: Path) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    called = nn.parallel.DistributedDataParallel(model)
    policy = ftopt.FaultPolicy(start_replicas=2, min_replicas=1, grace_s=5.0, dead_after_s=2.0, stragglers="wait")
    group = ftopt.connect(policy=policy)
    optimizer = ftopt.wrap(
        torch.optim.SGD(model.parameters(), lr=0.01), model, ftopt.LocalSGD(sync_every=2), group=group
    )
    data = [(torch.tensor([float(i), 1.0]), i) for i in range(SAMPLES)]
    workers = int(os.environ.get("WORKERS", "0"))
    loader = optimizer.loader(
        data, batch_size=4, num_workers=workers, multiprocessing_context="forkserver" if workers else None
    )
    checkpoints = ftopt.Checkpoints(folder / "checkpoints", optimizer, every=2)
    checkpoints.resume()
    with optimizer, (folder / f"{group.replica}.{dist.get_rank()}").open("a", encoding="utf-8") as out:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        checkpoints.include(scheduler=scheduler)
        for x, numbers in loader:
            out.write(f"{optimizer.local_steps} {' '.join(map(str, numbers.tolist()))}\n")
            out.flush()
            optimizer.zero_grad()
            called(x / SAMPLES).square().mean().backward()
            optimizer.step()
            scheduler.step()
            checkpoints.step()
            time.sleep(0.02)
        checkpoints.close()
    if dist.get_rank() == 0:
        (folder / f"{group.replica}.end").write_text(f"{optimizer.status.versions} {optimizer.pending_steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
