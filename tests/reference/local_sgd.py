"""Local SGD (arXiv 1805.09767) as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.problems import Problem
from tests.reference.start import start


def local_sgd(
    problem: Problem,
    *,
    replicas: int,
    sync_every: int,
    steps: int,
    also: Callable[[Sequence[nn.Module]], None] = lambda models: None,
    outer_start: int = 0,
) -> list[Tensor]:
    """Trains; returns the parameters of the average, tensor by tensor.

    Sums run in the order of the replicas, each summand multiplied by its share first.

    Args:
        also: called with the replicas' models at the end of each round.
        outer_start: steps that are each followed by an average, at the beginning.
    """
    models, inner = start(problem, replicas=replicas, steps=outer_start, whole=True)
    for step in range(outer_start, steps):
        for m in range(replicas):
            inner[m].zero_grad()
            problem.backward(models[m], m, step)
            inner[m].step()
        if (step + 1 - outer_start) % sync_every == 0:
            with torch.no_grad():
                for copies in zip(*(model.parameters() for model in models), strict=True):
                    mean = copies[0] * (1 / replicas)
                    for copy in copies[1:]:
                        mean = mean + copy * (1 / replicas)
                    for copy in copies:
                        copy.copy_(mean)
            also(models)
    return [p.detach().clone() for p in models[0].parameters()]
