"""An island's rank that is killed at a point of an outer step; run by torchrun, which starts the island again.

``python -m tests.island.struck FOLDER [RANK POINT]``: rank 0 kills ``RANK`` in the island's first life, when ``POINT``
happens to its replica for the second time; ``fetch`` in its second life, after a death of the first one. The
environment's ``METHOD`` is diloco, whose slices are on all ranks (4,000 columns: a slice is whole blocks of 16,384
elements), or syncsgd, whose fragment rank 0 has. All end when an island that was struck has taken `MORE` steps in its
last life.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftopt
from ftopt.events import Event

MORE = 40


class Strike:
    """Kills a process at the ``time``-th event of a name."""

    every_step = False

    def __init__(self, pid: int, point: str, at: int) -> None:
        self._pid, self._point, self._left = pid, point, at

    def __call__(self, event: Event) -> None:
        if event.event != self._point:
            return
        self._left -= 1
        if not self._left:
            print(f"strikes {time.time()}", flush=True)  # noqa: T201
            os.kill(self._pid, signal.SIGKILL)


def strike(rank: int, point: str) -> Strike:
    """What strikes in this life."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if point == "fetch":
        return Strike(pids[rank], *((("apply", 2), ("fetch", 1), ("", 0))[min(life, 2)]))
    return Strike(pids[rank], point if life == 0 else "", 2)


def all_end(folder: Path, *, struck: bool, steps: int) -> bool:
    """Whether all islands end; alike on the ranks of one."""
    last = struck and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0
    if last and steps == MORE:
        (folder / "end").touch()
    ends = [(folder / "end").exists()]
    dist.broadcast_object_list(ends)
    return ends[0]


def main(folder: Path, rank: int, point: str) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole = os.environ.get("METHOD") == "syncsgd"
    width, method = (12, ftopt.SyncSGD()) if whole else (4000, ftopt.DiLoCo(sync_every=4))
    model = nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    policy = ftopt.FaultPolicy(start_replicas=2, min_replicas=1, grace_s=5.0, dead_after_s=2.0, stragglers="wait")
    group = ftopt.connect(policy=policy, on_event=strike(rank, point))
    inner = torch.optim.SGD(model.parameters(), lr=0.05 if width == 12 else 1e-4, momentum=0.5)
    optimizer = ftopt.wrap(inner, model, method, group=group)
    checkpoints = ftopt.Checkpoints(folder, optimizer, every=2)
    with optimizer:
        checkpoints.include()
        start, leads = optimizer.start_step, dist.get_rank() == 0
        if leads:
            print(f"starts {time.time()} at {start}", flush=True)  # noqa: T201
        while not all_end(folder, struck=bool(point), steps=optimizer.local_steps):
            optimizer.zero_grad()
            model(torch.randn(8, 7)).square().mean().backward()
            optimizer.step()
            checkpoints.step()
            if leads:
                version, digest = optimizer.status.versions[0], optimizer.digest()
                print(f"step {optimizer.local_steps} {version} {digest}", flush=True)  # noqa: T201
            time.sleep(0.02)
        checkpoints.close()
    if leads:
        print(f"ends {optimizer.local_steps}", flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *((int(sys.argv[2]), sys.argv[3]) if len(sys.argv) > 2 else (0, "")))
