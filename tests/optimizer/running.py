"""Runs replicas as threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

from ftopt.connect import local_groups
from ftopt.methods import Method
from ftopt.optimizer import OuterOptimizer, wrap
from tests.problems import Problem

T = TypeVar("T")


def together(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Runs the tasks at once, a thread each; the first error is raised."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(task) for task in tasks]]


def train(
    problem: Problem, method: Method, *, replicas: int, steps: int, dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """Trains replicas on their own batches; returns each one's anchor, tensor by tensor."""
    models = [problem.model(0).to(dtype) for _ in range(replicas)]  # Here: the global seed is the process'.
    groups = local_groups(replicas)

    def replica(m: int) -> list[Tensor]:
        model = models[m]
        optimizer = wrap(problem.inner(model.parameters()), model, method, group=groups[m])
        with optimizer:
            for step in range(steps):
                optimizer.zero_grad()
                problem.backward(model, m, step)
                optimizer.step()
        return anchor(optimizer, model)

    return together([lambda m=m: replica(m) for m in range(replicas)])


def anchor(optimizer: OuterOptimizer, model: nn.Module) -> list[Tensor]:
    """The committed anchor, fp32, tensor by tensor."""
    (fragment,) = optimizer._core.started().fragments
    out, place = [], 0
    for parameter in model.parameters():
        out.append(fragment.state.anchor[place : place + parameter.numel()].view(parameter.shape).clone())
        place += parameter.numel()
    return out
