"""A replica of the benchmark of `ftopt plan`, as a program: it trains all cases in turns and reports the time."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import ftopt
from benchmarks.plan.cases import CASES, Case
from benchmarks.speed.models import of_size
from benchmarks.speed.orders import obey


def main() -> None:
    """Joins a job for each case; an order is a case's number and how many periods of inner steps it shall make."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    optimizers = [_optimizer(number, case, told) for number, case in enumerate(CASES)]
    for optimizer in optimizers:
        optimizer.__enter__()

    def carry_out(verb: str, number: int, periods: int) -> list[list[float]]:
        steps = max(10, CASES[number].method.sync_every)
        return [_period(optimizers[number], steps, told["step_s"]) for _ in range(periods)]

    obey(carry_out)


def _optimizer(number: int, case: Case, told: dict[str, Any]) -> ftopt.OuterOptimizer:
    model = of_size(told["parameters"])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    sync = ftopt.Sync(**told["sync"] | {"codec": case.codec})
    group = ftopt.connect(told["url"], told["replica"], job=f"case-{number}", sync=sync, host=told["host"])
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=1e-9), model, case.method, group=group)


def _period(optimizer: ftopt.OuterOptimizer, steps: int, step_s: float) -> list[float]:
    """Seconds that the inner steps took, and all of it. An inner step is a wait: a computation would compete with the
    outer steps for the machine's cores."""
    began, computed_s = time.perf_counter(), 0.0
    for _ in range(steps):
        start = time.perf_counter()
        time.sleep(step_s)
        computed_s += time.perf_counter() - start
        optimizer.step()
    return [computed_s, time.perf_counter() - began]


if __name__ == "__main__":
    main()
