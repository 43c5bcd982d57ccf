"""An island's rank for tests of its ends: trains DiLoCo on FSDP2, slowly enough to be killed; run by torchrun.

``python -m tests.island.dying STEPS HOW``; it prints a line a step on rank 0. ``HOW``: what goes wrong, see `main`.
With ``GATE`` in the environment it waits at half of its steps until there is a file of that name.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftopt
from ftopt.step.tensors.digest import digest


def main(steps: int, how: str) -> None:
    """One rank."""
    limit_s = float(os.environ.get("GROUP_TIMEOUT_S", "1800"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3))
    if "ddp" in how:
        called: nn.Module = nn.parallel.DistributedDataParallel(model)
        mesh = None
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        called = fully_shard(model, mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    policy = ftopt.FaultPolicy(
        start_replicas=int(os.environ.get("START_REPLICAS", "2")),
        min_replicas=1,
        grace_s=float(os.environ.get("GRACE_S", "5")),
        dead_after_s=2.0,
        on_loss=os.environ.get("ON_LOSS", "go_on"),
        stragglers="wait",
    )
    optimizer = ftopt.wrap(
        inner,
        model,
        ftopt.DiLoCo(sync_every=4),
        group=ftopt.connect(policy=policy, mesh=mesh, standby=how == "spare"),
        leave_on_signals=how == "leaves",
    )
    with optimizer:
        start = optimizer.start_step
        print(f"rank {rank} pid {os.getpid()} starts at {start}", flush=True)  # noqa: T201
        for step in range(start, steps):
            if step == steps // 2 and "GATE" in os.environ:
                while not Path(os.environ["GATE"]).exists():
                    time.sleep(0.05)
            x = torch.randn(8, 7)
            optimizer.zero_grad()
            called(x).square().mean().backward()
            if how == "rates" and rank == 1:
                inner.param_groups[0]["lr"] = 0.01
            if how == "ddp-drift" and rank == 1 and step == 6:
                with torch.no_grad():
                    next(model.parameters())[0, 0] += 1.0
            if how == "one-syncs" and rank == 0 and step == 6:
                optimizer.sync()
            if how == "is-slow" and step == 6:
                time.sleep(8.0)
            if how == "raises" and rank == 1 and step == 6:
                raise ValueError("the batch of rank 1 is bad")
            optimizer.step()
            if rank == 0:
                print(f"step {step} {optimizer.status.versions} {optimizer.local_steps}", flush=True)  # noqa: T201
            time.sleep(0.02)
    if how == "ddp-drift":
        alike = [torch.zeros(12, 7) for _ in range(2)]
        dist.all_gather(alike, next(model.parameters()).detach())
        print(f"alike {torch.equal(*alike)}", flush=True)  # noqa: T201
    print(f"rank {rank} ends at {optimizer.inner_step}", flush=True)  # noqa: T201
    if how == "spare":
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        record = optimizer._core.standing().committed.record
        chain = record.chain if record is not None else "unknown"
        print(f"rank {rank} has {digest(whole)} of chain {chain}", flush=True)  # noqa: T201
    # DDP goes before the process group: its reducer would drop it with the GIL held and wait for Gloo's threads, one of
    # which may wait for the GIL, to let go of the tensors of the last call above (torch 2.13).
    del called
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
