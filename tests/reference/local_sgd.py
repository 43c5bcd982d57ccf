"""Local SGD (arXiv 1805.09767) as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from tests.problems import Problem
from tests.reference.codecs import Mean
from tests.reference.start import start


def local_sgd(
    problem: Problem,
    *,
    replicas: int,
    sync_every: int,
    steps: int,
    also: Callable[[Sequence[nn.Module]], None] = lambda models: None,
    outer_start: int = 0,
    mean: Mean | None = None,
    rate: Callable[[int], float] | None = None,
    meets: Collection[int] | None = None,
) -> list[Tensor]:
    """Trains; returns the parameters of the average, tensor by tensor.

    Args:
        also: called with the replicas' models at the end of each round.
        outer_start: steps that are each followed by an average, at the beginning.
        mean: how they average; a lossy one gets the differences from the last average. Default: exactly.
        rate: the inner rate after so many steps. Default: the optimizer's own.
        meets: the inner steps after which they average. Default: every ``sync_every``.
    """
    mean = mean or Mean()
    models, inner = start(problem, mean, replicas=replicas, steps=outer_start, whole=not mean.lossy)
    theta = [p.detach().clone() for p in models[0].parameters()]
    for step in range(outer_start, steps):
        for m in range(replicas):
            if rate is not None:
                inner[m].param_groups[0]["lr"] = rate(step)
            inner[m].zero_grad()
            problem.backward(models[m], m, step)
            inner[m].step()
        if step + 1 in meets if meets is not None else (step + 1 - outer_start) % sync_every == 0:
            with torch.no_grad():
                if mean.lossy:
                    deltas = mean([[t - p for t, p in zip(theta, m.parameters(), strict=True)] for m in models])
                    theta = [t - delta for t, delta in zip(theta, deltas, strict=True)]
                else:
                    theta = mean([list(m.parameters()) for m in models], values=True)
                for model in models:
                    for p, t in zip(model.parameters(), theta, strict=True):
                        p.copy_(t)
            also(models)
    return [p.detach().clone() for p in models[0].parameters()]
