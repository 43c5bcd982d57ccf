"""The cost of an outer step compared with a bare all-reduce of as many bytes, and the time it takes from training."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ftopt
from benchmarks.speed.crew import coordinator, together
from benchmarks.speed.figures import QUICK_REPETITIONS, REPETITIONS, Row, Spread, in_turns, ratio
from benchmarks.speed.models import of_size
from benchmarks.speed.theirs import NoPeerError, diloco, lighthouse, manager
from ftopt.events import Event, ignore
from ftopt.methods import Method

ABOUT = (
    "One blocking outer step of DiLoCo with all its guarantees (coordinator with a journal, digests, commit), in 3 "
    "processes of one torch thread each, compared with Gloo's all-reduce of one flat fp32 tensor of that size in the "
    "same processes, in turns behind a barrier, once kernels are loaded; the slowest process counts. Each way has "
    "processes of its own. "
    "*metrics*: with a subscriber that wants the outer gradient's norm and cosine, in the processes of *DiLoCo*. "
    "*delay*: the time that a whole period takes from the training thread, the round itself being hidden behind its "
    "steps. The *floor* is the all-reduce plus the unavoidable sweeps over memory, at the rate of a plain copy in the "
    "same turn. Compared with torchft's DiLoCo, and torch's own PeriodicModelAverager, which only averages."
)
GOALS = "to bare Gloo: DiLoCo, 1M <= 3.5, 10M and 50M <= 2.2; bf16 <= 1.6; delay <= 0.3"
DRAWN = "to bare Gloo"
SIZE = 3
MILLION = 1_000_000
SWEEPS = 13
"""Of an outer step over memory, 4 bytes a parameter each. Payload: parameters and anchor are read, it is written.
Outer optimizer: anchor, momentum and mean are read, the next anchor and momentum written. Take-over: the anchor is
read, the parameters are written. Of these, memory that is only written is fetched before, three times."""
_COPY, _OF_A_COPY = "copy", 3
_BARE, _FLOOR = "bare Gloo", "floor"
_DILOCO, _MEASURED, _DELAYED = "DiLoCo", "DiLoCo, metrics", "DiLoCo, delay"
_AVERAGER = "torch's PeriodicModelAverager"
_CREWS = ((_DILOCO, _MEASURED), ("DiLoCo, bf16",), (_DELAYED,), (_AVERAGER,))
"""Which ways are measured together: at 50M all of them need more than 24 GiB, these at most 8."""
_TORCHFT = ("torchft's DiLoCo",)
_DELAY = 4
_BEHIND_S = 0.3
"""As long as the forward and backward pass at least, behind which a snapshot is taken and the round goes on."""


def run(quick: bool) -> list[Row]:
    """A row a size and way."""
    return [row for millions in ((1,) if quick else (1, 10, 50)) for row in _rows(millions, quick=quick)]


def _rows(millions: int, *, quick: bool) -> list[Row]:
    repetitions = QUICK_REPETITIONS if quick else REPETITIONS
    found: dict[str, list[float]] = {}
    beside: dict[str, tuple[list[float], list[float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))
        url = stack.enter_context(coordinator(folder))
        try:
            house = stack.enter_context(lighthouse(SIZE))
        except NoPeerError:
            house = ""
        for crew, ways in enumerate([*_CREWS, *([_TORCHFT] if house else [])]):
            store = str(folder / f"store-{crew}")
            of_ranks = together(measure, SIZE, ways, millions * MILLION, repetitions, url, house, store)
            slowest = {way: [max(t) for t in zip(*(r[way] for r in of_ranks), strict=True)] for way in of_ranks[0]}
            bare, copies = slowest[_BARE], slowest.pop(_COPY)
            floor = [reduced + SWEEPS / _OF_A_COPY * copied for reduced, copied in zip(bare, copies, strict=True)]
            for way, taken in {**slowest, _FLOOR: floor}.items():
                found.setdefault(way, []).extend(taken)
            beside |= dict.fromkeys(ways, (bare, floor))
    beside |= dict.fromkeys((_BARE, _FLOOR), (found[_BARE], found[_FLOOR]))
    return [
        {
            "parameters": f"{millions}M",
            "way": way,
            "ms": Spread.of([1000 * t for t in taken]),
            "to bare Gloo": ratio(taken, beside[way][0]),
            "to the floor": ratio(taken, beside[way][1]) if way == _DILOCO else None,
        }
        for way, taken in sorted(found.items(), key=lambda item: item[0] not in (_BARE, _FLOOR))
    ]


def measure(
    rank: int, size: int, ways: Sequence[str], parameters: int, repetitions: int, url: str, house: str, store: str
) -> Any:
    """Seconds of bare Gloo, a copy and each of ``ways``, by repetition."""
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
    flat = torch.randn(parameters)
    other = torch.zeros_like(flat)
    works: dict[str, Callable[[], float]] = {
        _BARE: lambda: _timed(partial(dist.all_reduce, flat)),
        _COPY: lambda: _timed(partial(other.copy_, flat)),
    }
    with ExitStack() as stack:
        for way in ways:
            model = of_size(parameters)
            step: Callable[[], Any]
            if way in _OURS:
                method, codec = _OURS[way]
                on_event = Measures() if way == _MEASURED else ignore
                job = way.replace(", ", "-")
                group = ftopt.connect(url, f"r{rank}", job=job, policy=job_policy(), on_event=on_event, mesh=False)
                optimizer = stack.enter_context(
                    ftopt.wrap(_sgd(model), model, replace(method, codec=codec), group=group)
                )
                step = partial(_delayed, optimizer, group, model) if way == _DELAYED else optimizer.step
            elif way == _AVERAGER:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)  # it averages what has a gradient
                step = _averager(model)
            else:
                inner = _sgd(model)
                stack.enter_context(diloco(stack.enter_context(manager(rank, house, size)), model, inner, 1))
                step = inner.step
            works[way] = partial(_moved_and_timed, model, step)
        for thread in threading.enumerate():
            if thread.name == "ftopt-kernels":
                thread.join()
        found = in_turns(works, repetitions)
        dist.barrier()
    dist.destroy_process_group()
    return found


class Measures:
    """A subscriber that wants to know the outer gradient's norm and cosine."""

    every_step = False
    outer_gradient = True

    def __call__(self, event: Event) -> None: ...


def job_policy() -> ftopt.FaultPolicy:
    """The job's settings: nobody is called in early on a busy machine."""
    return ftopt.FaultPolicy(start_replicas=SIZE, dead_after_s=30.0, grace_s=10.0)


def streaming() -> ftopt.StreamingDiLoCo:
    """One fragment, applied behind the next steps."""
    return ftopt.StreamingDiLoCo(sync_every=2 * _DELAY, delay=_DELAY, fragments=ftopt.fragments.Strided(n=1))


_OURS: dict[str, tuple[Method, str]] = {
    _DILOCO: (ftopt.DiLoCo(sync_every=1), "fp32"),
    _MEASURED: (ftopt.DiLoCo(sync_every=1), "fp32"),
    "DiLoCo, bf16": (ftopt.DiLoCo(sync_every=1), "bf16"),
    _DELAYED: (streaming(), "fp32"),
}
"""Way -> method and codec."""


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@torch.no_grad()
def _moved_and_timed(model: nn.Module, work: Callable[[], Any]) -> float:
    """As if by inner steps, which are not timed: with no gradients, the inner optimizer's own step is free."""
    for p in model.parameters():
        p.add_(1e-3)
    return _timed(work)


def _timed(work: Callable[[], Any]) -> float:
    """Seconds; a way that reports its own is believed."""
    dist.barrier()
    start = time.perf_counter()
    found = work()
    taken = time.perf_counter() - start
    return found if isinstance(found, float) else taken


def _delayed(optimizer: ftopt.ReplicaOptimizer, group: Any, model: nn.Module) -> float:
    """Seconds of the training thread for the steps of one period; between them it waits for what is on its way."""
    total_s = 0.0
    for step in range(2 * _DELAY):
        start = time.perf_counter()
        optimizer.step()
        total_s += time.perf_counter() - start
        deadline_s = start + _BEHIND_S if step == 0 else 0.0
        while step == 0 and (group.outstanding(0) or time.perf_counter() < deadline_s):
            time.sleep(0.0005)
    return total_s


def _averager(model: nn.Module) -> Callable[[], Any]:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    return lambda: averager.average_parameters(model.parameters())
