"""The cost of an outer step between islands of several ranks, compared with replicas of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftopt
from benchmarks.speed.crew import coordinator, together
from benchmarks.speed.figures import FEWER_REPETITIONS, QUICK_REPETITIONS, Row, Spread, in_turns, ratio
from benchmarks.speed.models import of_size
from benchmarks.speed.outer import MILLION, _moved_and_timed, _timed

ABOUT = (
    "One blocking outer step of DiLoCo by 2 islands of 4 ranks (FSDP2, Gloo), by mirror and by shard, compared with 2 "
    "replicas of one process with the same model, and the inner step (AdamW) of an island's rank between outer steps, "
    "wrapped (by mirror) and bare. 8 processes of one torch thread each, in turns behind a barrier; the slowest "
    "process counts. *Memory*: the most that building it and two outer steps have added to a process at a time, in "
    "multiples of the model; of the ranks that are not 0, the largest."
)
GOALS = "none"
DRAWN = "ms"
SCALE = "log"
RANKS = 4
_NEVER = 10**9
ONE, ISLANDS, SHARDS = "2 replicas x 1", "2 islands x 4, mirror", "2 islands x 4, shard"
BARE, WRAPPED = "inner step, bare", "inner step, wrapped"


def run(quick: bool) -> list[Row]:
    """A row a size and way."""
    rows: list[Row] = []
    for millions in (1,) if quick else (10, 50):
        with tempfile.TemporaryDirectory(prefix="ftopt-bench-") as folder, coordinator(Path(folder)) as url:
            repetitions = QUICK_REPETITIONS if quick else FEWER_REPETITIONS
            store = str(Path(folder) / "store")
            of_ranks = together(measure, 2 * RANKS, millions * MILLION, repetitions, url, store)
        times = {way: [max(t) for t in zip(*(r[0][way] for r in of_ranks), strict=True)] for way in of_ranks[0][0]}
        for way, base in ((ONE, ONE), (ISLANDS, ONE), (SHARDS, ONE), (BARE, BARE), (WRAPPED, BARE)):
            held = [r[1].get(way) for r in of_ranks]
            rows.append(
                {
                    "parameters": f"{millions}M",
                    "way": way,
                    "ms": Spread.of([1000 * t for t in times[way]]),
                    f"to {ONE}, to bare": ratio(times[way], times[base]),
                    "memory, rank 0": held[0],
                    "memory, other ranks": max(held[1:RANKS]) if way in (ISLANDS, SHARDS) else None,  # type: ignore[type-var]
                }
            )
    return rows


def measure(rank: int, size: int, parameters: int, repetitions: int, url: str, store: str) -> Any:
    """Seconds of each way, by repetition, and the memory that some of them hold."""
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
    mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("island", "rank"))["rank"]
    island, works, held = rank // RANKS, dict[str, Callable[[], float]](), dict[str, float]()

    def wrapped(
        job: str, model: nn.Module, every: int, inner: torch.optim.Optimizer, where: Any, kind: str = "mirror"
    ) -> Any:
        sync = ftopt.Sync(start_replicas=2, dead_after_s=30.0, grace_s=10.0)
        group = ftopt.connect(url, f"r{island}", job=job, sync=sync, mesh=where)
        return stack.enter_context(ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=every), group=group, island=kind))

    with ExitStack() as stack:
        for way in (ONE, ISLANDS, SHARDS):
            dist.barrier()
            before = _most(anew=True)
            if way != ONE or not rank % RANKS:
                model = fully_shard(of_size(parameters), mesh=mesh) if way != ONE else of_size(parameters)
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                kind = "shard" if way == SHARDS else "mirror"
                job = way.replace(" ", "-").replace(",", "")
                optimizer = wrapped(job, model, 1, inner, mesh if way != ONE else False, kind)
                works[way] = partial(_moved_and_timed, model, optimizer.step)
                for _ in range(2):
                    optimizer.step()
            else:
                works[way] = partial(_timed, lambda: None)
            held[way] = (_most() - before) / (4 * parameters)
        for way in (BARE, WRAPPED):
            model = fully_shard(of_size(parameters), mesh=mesh)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            bare = torch.optim.AdamW(model.parameters(), lr=1e-3)
            stepped = bare if way == BARE else wrapped("inner", model, _NEVER, bare, mesh)
            works[way] = partial(_timed, stepped.step)
        found = in_turns(works, repetitions)
        dist.barrier()
    dist.destroy_process_group()
    return found, held


def _most(*, anew: bool = False) -> int:
    """The most bytes that this process has had resident at a time. ``anew``: from now on."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
