"""DiLoCo (arXiv 2311.08105, algorithm 1) as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.problems import Problem
from tests.reference.codecs import Mean
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
    mean: Mean | None = None,
) -> list[Tensor]:
    """Trains; returns theta, the global parameters, tensor by tensor.

    Args:
        outer: makes torch's outer optimizer; None: the equations of Nesterov SGD, one operation a line.
        also: called with the replicas' models at the end of each round.
        outer_start: steps of plain averaging at the beginning.
        mean: how they average. Default: exactly.
    """
    mean = mean or Mean()
    models, inner = start(problem, mean, replicas=replicas, steps=outer_start)
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
            deltas = mean([[t - p for t, p in zip(theta, model.parameters(), strict=True)] for model in models])
            for i, (t, delta) in enumerate(zip(theta, deltas, strict=True)):
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
            for model in models:
                for p, t in zip(model.parameters(), theta, strict=True):
                    p.copy_(t)
            also(models)
    return theta
