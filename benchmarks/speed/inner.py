"""What the wrapper adds to an inner step that does not sync."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import ftopt
from benchmarks.speed.crew import together
from benchmarks.speed.figures import Row, Spread, in_turns
from benchmarks.speed.models import BYTE_GPT, FIFTY, byte_gpt, fifty_million

ABOUT = (
    "`step()` of a wrapped optimizer between two outer steps, compared with an unwrapped one on the same tensors, in "
    "turns in one process with one torch thread. CPU time of the thread."
)
GOALS = "ratio <= 1.01, or at most 20 µs added"
DRAWN = "more, µs"
_MODELS = {BYTE_GPT: byte_gpt, FIFTY: fifty_million}
_INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD, momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
}


def run(quick: bool) -> list[Row]:
    """A row a model and inner optimizer."""
    rows: list[Row] = together(_measure, 1, quick)[0]
    return rows


def _measure(rank: int, size: int, quick: bool) -> list[Row]:
    rows = []
    for name, make in list(_MODELS.items())[: 1 if quick else None]:
        steps = 400 if quick else 3000 if name == BYTE_GPT else 31
        for inner, optimizer in _INNER.items():
            rows.append(_row(name, inner, make(), optimizer, steps))
    return rows


def _row(name: str, kind: str, model: Any, make: Callable[..., torch.optim.Optimizer], steps: int) -> Row:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    inner, bare = make(model.parameters()), make(model.parameters())
    bare.state = inner.state  # a copy lies elsewhere in memory: its steps alone can be 7 % faster or slower
    wrapped = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=10**9), group=ftopt.solo())
    with wrapped:
        found = in_turns({"bare": partial(_step_s, bare), "wrapped": partial(_step_s, wrapped)}, steps, warm=5)
        wrapped.close(flush=False)
    more = [ours - theirs for ours, theirs in zip(found["wrapped"], found["bare"], strict=True)]
    return {
        "model": name,
        "tensors": len(list(model.parameters())),
        "inner": kind,
        "bare, µs": 1e6 * Spread.of(found["bare"]).median,
        "more, µs": Spread.of([1e6 * x for x in more]),
        "ratio": 1 + Spread.of(more).median / Spread.of(found["bare"]).median,
    }


def _step_s(optimizer: torch.optim.Optimizer) -> float:
    start = time.thread_time()
    optimizer.step()
    return time.thread_time() - start
