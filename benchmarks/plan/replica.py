"""A replica of the benchmark of `ftopt plan`, as a program: it trains all cases in turns and reports the time."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch

import ftopt
from benchmarks.plan.cases import CASES, Case
from benchmarks.speed.models import of_size
from benchmarks.speed.orders import obey


def main() -> None:
    """Joins a job for each case. Orders: ``run CASE PERIODS``, and ``bare STEPS``: inner steps without ftopt. The
    answer to both: steps and seconds, of each period."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    optimizers = [_optimizer(number, case, told) for number, case in enumerate(CASES)]
    for optimizer in optimizers:
        optimizer.__enter__()

    bare = _model(told["parameters"])
    inner = torch.optim.SGD(bare.parameters(), lr=1e-9)

    def carry_out(verb: str, number: int, periods: int = 1) -> list[list[float]]:
        if verb == "bare":
            return [[number, _taken_s(inner, number, told["step_s"])]]
        steps = max(10, CASES[number].method.sync_every)
        return [[steps, _taken_s(optimizers[number], steps, told["step_s"])] for _ in range(periods)]

    obey(carry_out)


def _model(parameters: int) -> torch.nn.Module:
    model = of_size(parameters)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model


def _optimizer(number: int, case: Case, told: dict[str, Any]) -> ftopt.ReplicaOptimizer:
    model = _model(told["parameters"])
    policy = ftopt.FaultPolicy(**told["policy"])
    group = ftopt.connect(told["url"], told["replica"], job=f"case-{number}", policy=policy, host=told["host"])
    return ftopt.wrap(
        torch.optim.SGD(model.parameters(), lr=1e-9), model, replace(case.method, codec=case.codec), group=group
    )


def _taken_s(optimizer: torch.optim.Optimizer, steps: int, step_s: float) -> float:
    """Seconds of so many inner steps. One is a wait and the inner optimizer: a computation would compete with the outer
    steps for the machine's cores."""
    began = time.perf_counter()
    for _ in range(steps):
        time.sleep(step_s)
        optimizer.step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
