"""How much memory a replica needs, as a multiple of its parameters."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ftopt
from benchmarks.speed.crew import coordinator, together
from benchmarks.speed.figures import Row
from benchmarks.speed.models import of_size
from benchmarks.speed.theirs import NoPeerError, diloco, lighthouse, manager

ABOUT = (
    "Peak resident memory of a process above its memory after the imports, divided by the bytes of its parameters: "
    "fp32 parameters, gradients (cleared by `zero_grad()` after each step) and inner state included. 2 processes, 3 "
    "outer steps of each fragment, 8 inner steps apart, so that each of 8 fragments has its own; the larger of the "
    "two counts. Bare: the inner optimizer alone. On disk: with `state_dir`. In all variants glibc returns freed "
    "memory to the kernel at once, from 1 MB on (`MALLOC_MMAP_THRESHOLD_`): otherwise it keeps one more gradient in "
    "some runs."
)
GOALS = "SGD, 1 fragment <= 5.5, 8 fragments <= 4.5"
DRAWN = "peak"
_INNER = {"SGD": partial(torch.optim.SGD, lr=0.1), "AdamW": partial(torch.optim.AdamW, lr=1e-3)}
_STEPS = 8
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
WAYS = (
    "bare",
    "DiLoCo, 1 fragment",
    "DiLoCo, 8 fragments",
    "DiLoCo, 1 fragment, state on disk",
    "DiLoCo, 8 fragments, state on disk",
    "torchft's DiLoCo, 1 fragment",
)
_QUICK = WAYS[1:2]


def run(quick: bool) -> list[Row]:
    """A row a way and inner optimizer."""
    parameters = 10_000_000 if quick else 50_000_000
    rows = []
    for inner in ("SGD",) if quick else _INNER:
        for way in _QUICK if quick else WAYS:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))
                try:
                    server = lighthouse(2) if way.startswith("torchft") else coordinator(folder)
                    url = stack.enter_context(server)
                except NoPeerError:
                    continue
                with _environment(_ALLOCATOR):
                    peaks = together(_peak, 2, parameters, inner, way, url, folder, fresh=True)
            rows.append({"parameters": parameters, "inner": inner, "way": way, "peak": max(peaks)})
    return rows


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """What processes that are started meanwhile find in their environment."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _peak(rank: int, size: int, parameters: int, inner: str, way: str, url: str, folder: Path) -> float:
    """Its peak over the bytes of its parameters."""
    _use_everything()
    if way.startswith("torchft"):
        import torchft.local_sgd
        import torchft.manager  # noqa: F401
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    model = of_size(parameters)
    with ExitStack() as stack:
        optimizer = _optimizer(stack, rank, size, model, inner, way, url, folder)
        for _ in range(3 * _STEPS):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        peak = _status("VmHWM")
    return (peak - before) / (4 * parameters)


def _optimizer(
    stack: ExitStack, rank: int, size: int, model: torch.nn.Module, inner: str, way: str, url: str, folder: Path
) -> torch.optim.Optimizer:
    made = _INNER[inner](model.parameters())
    if way == "bare":
        return made
    if way.startswith("torchft"):
        stack.enter_context(diloco(stack.enter_context(manager(rank, url, size)), model, made, _STEPS))
        return made
    fragments = int(way.split()[1])
    outer = ftopt.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
    method: Any = ftopt.DiLoCo(sync_every=_STEPS)
    if fragments > 1:
        method = ftopt.StreamingDiLoCo(
            sync_every=_STEPS, delay=0, fragments=ftopt.fragments.Balanced(n=fragments), outer=outer
        )
    policy = ftopt.FaultPolicy(start_replicas=size, dead_after_s=60.0, grace_s=60.0)
    group = ftopt.connect(url, f"r{rank}", policy=policy)
    state_dir = folder if way.endswith("on disk") else None
    return stack.enter_context(ftopt.wrap(made, model, method, group=group, state_dir=state_dir))


def _use_everything() -> None:
    """What a first use imports is no memory of the model's: torch.optim's first step alone brings in 100 MB."""
    import ftopt.sync.replica.client
    import ftopt.transport.gloo
    import ftopt.transport.state_server

    for make in _INNER.values():
        model = torch.nn.Linear(8, 8)
        with ftopt.wrap(make(model.parameters()), model, ftopt.DiLoCo(sync_every=1), group=ftopt.solo()) as optimizer:
            for _ in range(3):
                model(torch.ones(8)).sum().backward()
                optimizer.step()


def _status(key: str) -> int:
    """Bytes of a line of ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
