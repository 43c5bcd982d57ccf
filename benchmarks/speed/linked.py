"""A replica of the benchmark of link rates, as a program: it trains with each method in turn and reports the time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import ftopt
from benchmarks.speed.models import of_size
from benchmarks.speed.orders import obey
from ftopt.methods import Method

WAYS = ("SyncSGD", "DiLoCo", "Streaming", "+ delay", "+ fp4")
EVERY, FRAGMENTS, DELAY = 20, 4, 4


def method_of(way: str) -> Any:
    """Its settings."""
    if way == "SyncSGD":
        return ftopt.SyncSGD()
    if way == "DiLoCo":
        return ftopt.DiLoCo(sync_every=EVERY)
    delay = 0 if way == "Streaming" else DELAY
    codec = "fp4" if way == "+ fp4" else "fp32"
    fragments = ftopt.fragments.Balanced(n=FRAGMENTS)
    return ftopt.StreamingDiLoCo(sync_every=EVERY, delay=delay, fragments=fragments, codec=codec)


def main() -> None:
    """Joins a job of each way; an order is a way's number and how many periods of inner steps it shall make."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    optimizers = {way: _optimizer(way, told) for way in WAYS}
    for optimizer in optimizers.values():
        optimizer.__enter__()

    def carry_out(verb: str, number: int, periods: int) -> list[list[float]]:
        way = WAYS[number]
        steps = 1 if way == "SyncSGD" else EVERY
        return [period(optimizers[way], steps, told["step_s"]) for _ in range(periods)]

    obey(carry_out)


def _optimizer(way: str, told: dict[str, Any]) -> ftopt.ReplicaOptimizer:
    model = of_size(told["parameters"])
    if way == "SyncSGD":
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    policy = ftopt.FaultPolicy(**told["policy"])
    group = ftopt.connect(told["url"], told["replica"], job=way.replace("+ ", "and-"), policy=policy, host=told["host"])
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=1e-9), model, method_of(way), group=group)


def period(optimizer: ftopt.ReplicaOptimizer, steps: int, step_s: float) -> list[float]:
    """Seconds that the inner steps took, and all of it."""
    began, computed_s = time.perf_counter(), 0.0
    for _ in range(steps):
        start = time.perf_counter()
        time.sleep(step_s)
        computed_s += time.perf_counter() - start
        optimizer.step()
    return [computed_s, time.perf_counter() - began]


def serve(method_of: Callable[[int, int], Method]) -> None:
    """A replica, as a program; orders begin and end a job, named by its method's two numbers, the second of which is
    a period in inner steps, or tell it how many periods to train for."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    jobs: dict[tuple[int, int], ftopt.ReplicaOptimizer] = {}

    def carry_out(verb: str, number: int, every: int, periods: int = 0) -> list[list[float]]:
        if verb == "begin":
            model = of_size(told["parameters"])
            for p in model.parameters():
                p.grad = torch.full_like(p, 1e-3 * (1 + int(told["replica"][1:])))
            policy = ftopt.FaultPolicy(**told["policy"])
            job = f"{number}-{every}"
            group = ftopt.connect(told["url"], told["replica"], job=job, policy=policy, host=told["host"])
            inner = torch.optim.SGD(model.parameters(), lr=1e-9)
            jobs[number, every] = ftopt.wrap(inner, model, method_of(number, every), group=group).__enter__()
        elif verb == "end":
            jobs.pop((number, every)).__exit__(None, None, None)
        return [period(jobs[number, every], every, told["step_s"]) for _ in range(periods)]

    obey(carry_out)


if __name__ == "__main__":
    main()
