"""What the guard measures, and how: each work as a multiple of a plain copy of as many bytes.

A turn is the work once and the copy a few times. A multiple is the median over the turns: other processes slow down
both parts of a turn, or the whole of a few turns. Wall time would count what the others take; CPU time does not.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ftopt
from benchmarks.speed.codec import CODECS
from benchmarks.speed.models import of_size
from ftopt.codecs import codec_named

Turn = Callable[[], tuple[float, float]]
"""Seconds of CPU time: of the work, and of the copy."""
WARM = 3
"""Turns that do not count."""

_REPLICAS = 2
_PARAMETERS = 8_000_000
_VALUES = 1 << 22
"""Of a codec's payload: 16 MiB."""
_TENSORS, _ELEMENTS = 15, 64
"""Of the model for inner steps: so small that what the wrapper adds is not lost in the optimizer's arithmetic."""
_PATIENT_S = 120.0


@dataclass(frozen=True)
class Work:
    """One row of the guard's table.

    Args:
        what: the row's text.
        turns: how many count.
        opened: makes what the turns need, and removes it at the end.
    """

    what: str
    turns: int
    opened: Callable[[], AbstractContextManager[Turn]]


def multiple(work: Work, turns: int) -> float:
    """CPU time of ``work`` in multiples of its copy: the median of so many turns."""
    torch.set_num_threads(1)
    with work.opened() as turn, _no_collections():
        for _ in range(WARM):
            turn()
        return statistics.median(ours / copy for ours, copy in (turn() for _ in range(turns)))


def _least_s(work: Callable[[], object], times: int) -> float:
    """CPU time of this process that ``work`` takes at best."""
    best = float("inf")
    for _ in range(times):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


@contextmanager
def _outer() -> Iterator[Turn]:
    """Outer steps of DiLoCo in fp32. Without gradients an inner step takes no time."""
    models = [of_size(_PARAMETERS) for _ in range(_REPLICAS)]
    policy = ftopt.FaultPolicy(dead_after_s=_PATIENT_S, grace_s=_PATIENT_S)  # a busy machine loses no replica
    optimizers = [
        ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=1), group=group)
        for model, group in zip(models, ftopt.local_groups(_REPLICAS, policy=policy), strict=True)
    ]
    source, target = torch.randn(_PARAMETERS), torch.zeros(_PARAMETERS)
    steps = 0

    def turn() -> tuple[float, float]:
        nonlocal steps
        with torch.no_grad():
            for model in models:
                for p in model.parameters():
                    p.add_(1e-3)
        steps += 1
        ours = _least_s(lambda: together("step"), 1)
        if any(optimizer.status.versions != (steps,) for optimizer in optimizers):
            raise RuntimeError(f"outer step {steps} of the guard has not been committed by both replicas")
        return ours, _least_s(partial(target.copy_, source), 8)

    with _quiet(), ThreadPoolExecutor(_REPLICAS) as pool:

        def together(do: str, **how: Any) -> None:
            for done in [pool.submit(getattr(optimizer, do), **how) for optimizer in optimizers]:
                done.result()

        together("__enter__")
        try:
            yield turn
        finally:
            together("close", flush=False)


@contextmanager
def _inner(make: Callable[..., torch.optim.Optimizer]) -> Iterator[Turn]:
    """What the wrapper adds to the optimizer's own step; the copy takes the tensors one by one, as an optimizer does
    that has no arithmetic."""
    model = nn.ParameterList(nn.Parameter(torch.randn(_ELEMENTS)) for _ in range(_TENSORS))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    inner, bare = make(model.parameters()), make(model.parameters())
    bare.state = inner.state  # a copy lies elsewhere in memory, where a step alone takes another time
    wrapped = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=10**9), group=ftopt.solo())
    pairs = [(p.detach().clone(), p.detach()) for p in model.parameters()]
    orders = [(bare, wrapped), (wrapped, bare)]

    def copy() -> None:
        for target, source in pairs:
            target.copy_(source)

    def turn() -> tuple[float, float]:
        orders.reverse()
        taken = {optimizer: _least_s(optimizer.step, 5) for optimizer in orders[0]}
        return taken[wrapped] - taken[bare], _least_s(copy, 5)

    with _quiet(), wrapped:
        yield turn
        wrapped.close(flush=False)


@contextmanager
def _codec(spec: str) -> Iterator[Turn]:
    """A payload is encoded and decoded."""
    codec = codec_named(spec)
    payload = torch.randn(_VALUES, generator=torch.Generator().manual_seed(0))
    decoded, target = torch.empty_like(payload), torch.zeros_like(payload)

    def there_and_back() -> Tensor | None:
        return codec.decode(codec.encode(payload), decoded)

    yield lambda: (_least_s(there_and_back, 1), _least_s(partial(target.copy_, payload), 4))


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage is not collected in the middle of a turn."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Nobody needs to know that the replicas leave with pending steps."""
    log = logging.getLogger("ftopt")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


WORKS: Mapping[str, Work] = {
    "outer": Work(f"outer step, {_REPLICAS} x {_PARAMETERS // 1_000_000}M parameters, fp32", 30, _outer),
    "sgd": Work(
        f"added to an inner step, SGD, {_TENSORS} tensors",
        400,
        partial(_inner, partial(torch.optim.SGD, lr=1e-3, momentum=0.9)),
    ),
    "adamw": Work(
        f"added to an inner step, AdamW, {_TENSORS} tensors", 400, partial(_inner, partial(torch.optim.AdamW, lr=1e-3))
    ),
    **{spec.partition(":")[0]: Work(f"encode and decode, {spec}", 31, partial(_codec, spec)) for spec in CODECS},
}
"""By the word that selects it on the command line."""
