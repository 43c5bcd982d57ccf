"""Replicas, and the synchronous training with which post-local methods begin (arXiv 1808.07217)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from tests.problems import Problem
from tests.reference.codecs import Mean


def start(
    problem: Problem,
    mean: Mean,
    *,
    replicas: int,
    steps: int,
    whole: bool = False,
    fragments: Sequence[Sequence[str]] | None = None,
) -> tuple[list[nn.Module], list[Optimizer]]:
    """Models and inner optimizers after ``steps`` steps, each followed by an average of the parameters.

    Args:
        mean: how they average.
        whole: the parameters are averaged; else their differences from the last average are.
        fragments: names of the parameters that travel together. Default: all.
    """
    models = [problem.model(0) for _ in range(replicas)]
    inner = [problem.inner(model.parameters()) for model in models]
    named = [dict(model.named_parameters()) for model in models]
    theta = {name: p.detach().clone() for name, p in named[0].items()}
    for step in range(steps):
        for m in range(replicas):
            inner[m].zero_grad()
            problem.backward(models[m], m, step)
            inner[m].step()
        with torch.no_grad():
            for place, names in enumerate([list(theta)] if fragments is None else fragments):
                brought = [[one[name] if whole else theta[name] - one[name] for name in names] for one in named]
                for name, average in zip(names, mean(brought, place=place, values=whole, names=names), strict=True):
                    theta[name] = average if whole else theta[name] - average
                    for one in named:
                        one[name].copy_(theta[name])
    return models, inner
