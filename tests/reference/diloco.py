"""DiLoCo (arXiv 2311.08105, algorithm 1) as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.problems import Problem
from tests.reference.start import start


def diloco(
    problem: Problem,
    *,
    replicas: int,
    sync_every: int,
    steps: int,
    lr: float = 0.7,
    momentum: float = 0.9,
    outer: Callable[[list[Tensor]], Optimizer] | None = None,
    also: Callable[[Sequence[nn.Module]], None] = lambda models: None,
    outer_start: int = 0,
) -> list[Tensor]:
    """Trains; returns theta, the outer parameters, tensor by tensor.

    Args:
        outer: makes torch's outer optimizer; None: the equations of Nesterov SGD, one operation a line, on sums in the
            order of the replicas.
        also: called with the replicas' models at the end of each round.
        outer_start: steps of plain averaging at the beginning.
    """
    models, inner = start(problem, replicas=replicas, steps=outer_start)
    theta = [p.detach().clone() for p in models[0].parameters()]
    velocity = [torch.zeros_like(t) for t in theta]
    theirs = None if outer is None else outer(theta)
    for step in range(outer_start, steps):
        for m in range(replicas):
            inner[m].zero_grad()
            problem.backward(models[m], m, step)
            inner[m].step()
        if (step + 1 - outer_start) % sync_every:
            continue
        with torch.no_grad():
            copies = list(zip(*(model.parameters() for model in models), strict=True))
            for i, t in enumerate(theta):
                delta = (t - copies[i][0]) * (1 / replicas)
                for copy in copies[i][1:]:
                    delta = delta + (t - copy) * (1 / replicas)
                if theirs is not None:
                    t.grad = delta
                    continue
                velocity[i] = velocity[i] * momentum
                velocity[i] = velocity[i] + delta
                ahead = velocity[i] * momentum
                ahead = ahead + delta
                ahead = ahead * lr
                t.sub_(ahead)
            if theirs is not None:
                theirs.step()
            for i, t in enumerate(theta):
                for copy in copies[i]:
                    copy.copy_(t)
            also(models)
    return theta
