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
    "One blocking outer step of DiLoCo by 2 islands of 4 ranks (FSDP2, Gloo), compared with 2 replicas of one process "
    "with the same model, and the inner step (AdamW) of an island's rank between outer steps, wrapped and bare. 8 "
    "processes of one torch thread each, in turns behind a barrier; the slowest process counts. *Memory*: by how "
    "much a fresh process has grown at most during its third outer step, in multiples of the model; of the ranks that "
    "are not 0, the largest."
)
GOALS = "none"
DRAWN = "ms"
SCALE = "log"
RANKS = 4
_NEVER = 10**9
ONE, ISLANDS = "2 replicas x 1", "2 islands x 4"
BARE, WRAPPED = "inner step, bare", "inner step, wrapped"


def run(quick: bool) -> list[Row]:
    """A row a size and way."""
    rows: list[Row] = []
    for millions in (1,) if quick else (10, 50):
        with tempfile.TemporaryDirectory(prefix="ftopt-bench-") as folder, coordinator(Path(folder)) as url:
            repetitions = QUICK_REPETITIONS if quick else FEWER_REPETITIONS
            store = str(Path(folder) / "store")
            of_ranks = together(measure, 2 * RANKS, millions * MILLION, repetitions, url, store)
            held = {
                way: together(memory, 2 * RANKS, millions * MILLION, way, url, f"{store}-{number}")
                for number, way in enumerate((ONE, ISLANDS))
            }
        times = {way: [max(t) for t in zip(*(r[way] for r in of_ranks), strict=True)] for way in of_ranks[0]}
        for way, base in ((ONE, ONE), (ISLANDS, ONE), (BARE, BARE), (WRAPPED, BARE)):
            of_way = held.get(way, [None])
            rows.append(
                {
                    "parameters": f"{millions}M",
                    "way": way,
                    "ms": Spread.of([1000 * t for t in times[way]]),
                    f"to {ONE}, to bare": ratio(times[way], times[base]),
                    "memory, rank 0": of_way[0],
                    "memory, other ranks": max(of_way[1:RANKS]) if way == ISLANDS else None,
                }
            )
    return rows


def measure(rank: int, size: int, parameters: int, repetitions: int, url: str, store: str) -> Any:
    """Seconds of each way, by repetition."""
    mesh, works = _met(rank, size, store), dict[str, Callable[[], float]]()
    with ExitStack() as stack:
        for way in (ONE, ISLANDS):
            works[way] = partial(_timed, lambda: None)
            if (made := _made(stack, way, rank, parameters, url, mesh)) is not None:
                works[way] = partial(_moved_and_timed, made[0], made[1].step)
        for way in (BARE, WRAPPED):
            model: Any = fully_shard(of_size(parameters), mesh=mesh)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            stepped: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if way == WRAPPED:
                stepped = _wrapped(stack, "inner", rank, model, stepped, _NEVER, url, mesh)
            works[way] = partial(_timed, stepped.step)
        found = in_turns(works, repetitions)
        dist.barrier()
    dist.destroy_process_group()
    return found


def memory(rank: int, size: int, parameters: int, way: str, url: str, store: str) -> float:
    """What one way has added to a fresh process at most during an outer step, in multiples of the model."""
    mesh = _met(rank, size, store)
    with ExitStack() as stack:
        before = _most(anew=True)
        made = _made(stack, way, rank, parameters, url, mesh, job="memory-")
        dist.barrier()
        _most(anew=True)
        if made is not None:
            made[1].step()
        found = (_most() - before) / (4 * parameters)
        dist.barrier()
    dist.destroy_process_group()
    return found


def _met(rank: int, size: int, store: str) -> Any:
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
    return init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("island", "rank"))["rank"]


def _made(
    stack: ExitStack, way: str, rank: int, parameters: int, url: str, mesh: Any, job: str = ""
) -> tuple[nn.Module, Any] | None:
    """A model and its optimizer after two outer steps; None: this process has no part in it."""
    dist.barrier()
    if way == ONE and rank % RANKS:
        return None
    model: Any = of_size(parameters) if way == ONE else fully_shard(of_size(parameters), mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    job += way.replace(" ", "-").replace(",", "")
    optimizer = _wrapped(stack, job, rank, model, inner, 1, url, False if way == ONE else mesh)
    for _ in range(2):
        optimizer.step()
    return model, optimizer


def _wrapped(
    stack: ExitStack,
    job: str,
    rank: int,
    model: nn.Module,
    inner: torch.optim.Optimizer,
    every: int,
    url: str,
    where: Any,
) -> Any:
    policy = ftopt.FaultPolicy(start_replicas=2, dead_after_s=30.0, grace_s=10.0)
    group = ftopt.connect(url, f"r{rank // RANKS}", job=job, policy=policy, mesh=where)
    return stack.enter_context(ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=every), group=group))


def _most(*, anew: bool = False) -> int:
    """The most bytes that this process has had resident at a time. ``anew``: from now on."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
