"""What a replica that trains on a GPU pays: per inner step, per outer step, and in the GPU's memory."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ftopt
from benchmarks.speed.crew import coordinator, together
from benchmarks.speed.figures import QUICK_REPETITIONS, NotHereError, Row, Spread, in_turns, ratio
from benchmarks.speed.models import gpt2_124m
from ftopt.common.streams import finish

ABOUT = (
    "GPT-2 124M, fused AdamW, 12 windows of 1,024 tokens per inner step in bf16 autocast, on one GPU: periods of 12 "
    "inner steps with one outer step in each, in turns with periods of an unwrapped optimizer (*bare*). *added*: what "
    "a period takes longer than the bare one beside it. *memory*, *reserved*: what `torch.cuda.max_memory_allocated()` "
    "and `max_memory_reserved()` are above those of bare training, in bytes per parameter. With 2 replicas, two "
    "processes share the GPU, and the network is loopback; *bare Gloo* is its all-reduce of as many fp32 values in the "
    "host's memory."
)
GOALS = "between outer steps <= 1.01; delay <= 1.01"
DRAWN = "to bare"
STEPS, _DELAY = 12, 4
_REPETITIONS = 5
_BATCH, _CONTEXT = 12, 1024
_BARE, _GLOO = "bare", "bare Gloo"
_DELAYED = partial(ftopt.StreamingDiLoCo, delay=_DELAY, fragments=ftopt.fragments.Strided(n=1))
_WAYS: dict[str, tuple[Any, str]] = {
    "between outer steps": (ftopt.DiLoCo(sync_every=10**9), "fp32"),
    "DiLoCo": (ftopt.DiLoCo(sync_every=STEPS), "fp32"),
    "DiLoCo, bf16": (ftopt.DiLoCo(sync_every=STEPS), "bf16"),
    "delay": (_DELAYED(sync_every=STEPS), "fp32"),
    "delay, fp4": (_DELAYED(sync_every=STEPS), "fp4"),
}


def run(quick: bool) -> list[Row]:
    """A row per number of replicas and way.

    Raises:
        NotHereError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise NotHereError("torch finds no CUDA device")
    return [row for replicas in (1, 2) for row in rows(replicas, QUICK_REPETITIONS if quick else _REPETITIONS)]


def rows(replicas: int, repetitions: int, device: str = "cuda") -> list[Row]:
    """Those of so many replicas."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))
        url = stack.enter_context(coordinator(folder))
        return rows_of(together(measure, replicas, repetitions, url, str(folder / "store"), device))


@dataclass
class Found:
    """What one replica has measured, by way.

    Args:
        bare, ours: seconds of each period, in turns.
        allocated, reserved: bytes per parameter.
        gloo: seconds of each bare all-reduce, if there are others.
    """

    bare: dict[str, list[float]]
    ours: dict[str, list[float]]
    allocated: dict[str, float]
    reserved: dict[str, float]
    gloo: list[float]


def rows_of(of_ranks: list[Found]) -> list[Row]:
    """The slowest replica counts."""
    found = list[Row]()
    for way in _WAYS:
        bare = [max(each) for each in zip(*(r.bare[way] for r in of_ranks), strict=True)]
        ours = [max(each) for each in zip(*(r.ours[way] for r in of_ranks), strict=True)]
        row: Row = {"replicas": len(of_ranks), "way": way}
        row["bare step, ms"] = Spread.of([1000 * t / STEPS for t in bare])
        row["to bare"] = ratio(ours, bare)
        row["added, ms"] = Spread.of([1000 * (a - b) for a, b in zip(ours, bare, strict=True)])
        row["memory"] = max(r.allocated[way] - r.allocated[_BARE] for r in of_ranks)
        row["reserved"] = max(r.reserved[way] - r.reserved[_BARE] for r in of_ranks)
        found.append(row)
    if len(of_ranks) > 1:
        gloo = Spread.of([1000 * max(each) for each in zip(*(r.gloo for r in of_ranks), strict=True)])
        found.append({**dict.fromkeys(found[0]), "replicas": len(of_ranks), "way": _GLOO, "added, ms": gloo})
    return found


def measure(rank: int, size: int, repetitions: int, url: str, store: str, device: str) -> Found:
    """One replica's part."""
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
    here, found = torch.device(device), Found({}, {}, {}, {}, [])
    for way in (_BARE, *_WAYS):
        found.allocated[way], found.reserved[way] = _peaks(partial(_Way, way, rank, size, url, here), here)
    for way in _WAYS:
        with _Way(_BARE, rank, size, url, here) as bare, _Way(way, rank, size, url, here) as ours:
            taken = in_turns({_BARE: bare.period_s, way: ours.period_s}, repetitions, warm=1)
            dist.barrier()
        found.bare[way], found.ours[way] = taken[_BARE], taken[way]
        numel = ours.parameters
        del bare, ours
        _let_go(here)
    if size > 1:
        flat = torch.zeros(numel)
        found.gloo = in_turns({_GLOO: partial(_all_reduce_s, flat)}, repetitions)[_GLOO]
        dist.barrier()
    dist.destroy_process_group()
    return found


class _Way:
    """A model that is trained in one way."""

    def __init__(self, way: str, rank: int, size: int, url: str, device: torch.device, *, job: str = "time") -> None:
        self._model, self._device = gpt2_124m().to(device), device
        self.parameters = sum(p.numel() for p in self._model.parameters())
        vocab = self._model.get_parameter("head.weight").shape[0]
        chance = torch.Generator().manual_seed(rank)
        self._tokens = torch.randint(vocab, (_BATCH, _CONTEXT + 1), generator=chance).to(device)
        inner = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._optimizer: torch.optim.Optimizer = inner
        self._group: Any = None
        if way != _BARE:
            method, codec = _WAYS[way]
            policy = ftopt.FaultPolicy(start_replicas=size, dead_after_s=60.0, grace_s=30.0)
            name = f"{job}-{list(_WAYS).index(way)}"
            self._group = ftopt.connect(url, f"r{rank}", job=name, policy=policy, mesh=False)
            self._optimizer = ftopt.wrap(inner, self._model, replace(method, codec=codec), group=self._group)

    def __enter__(self) -> _Way:
        if self._group is not None:
            self._optimizer.__enter__()  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            self._optimizer.close(flush=False)  # type: ignore[attr-defined]

    def period_s(self) -> float:
        """Seconds of a period, as training sees it. What it leaves on its way is waited for afterwards: it takes
        nothing from the ways that come next."""
        finish(self._device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            self._step()
        finish(self._device)
        taken = time.perf_counter() - start
        while self._group is not None and self._group.outstanding(0):
            time.sleep(0.001)
        return taken

    def _step(self) -> None:
        inputs, targets = self._tokens[:, :-1], self._tokens[:, 1:]
        with torch.autocast(self._device.type, torch.bfloat16):
            logits: Tensor = self._model(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


def _peaks(make: Callable[..., _Way], device: torch.device) -> tuple[float, float]:
    """The most bytes per parameter that torch allocates and reserves in two periods."""
    _let_go(device)
    before = _memory(device)
    with make(job="memory") as made:
        _let_go(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(2):
            made.period_s()
        dist.barrier()
    peaks, parameters = _memory(device, "peak"), made.parameters
    return (peaks[0] - before[0]) / parameters, (peaks[1] - before[1]) / parameters


def _memory(device: torch.device, when: str = "current") -> tuple[int, int]:
    """Bytes allocated and reserved."""
    if device.type != "cuda":
        return 0, 0
    stats = torch.cuda.memory_stats(device)  # empty before CUDA's first use
    return stats.get(f"allocated_bytes.all.{when}", 0), stats.get(f"reserved_bytes.all.{when}", 0)


def _let_go(device: torch.device) -> None:
    """Gives back what torch keeps for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _all_reduce_s(flat: Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(flat)
    return time.perf_counter() - start
