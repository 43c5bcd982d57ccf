"""Elastic averaging (arXiv 1412.6651, synchronous) as a plain loop over explicit replicas; the centre moves first."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.problems import Problem


def easgd(
    problem: Problem, *, replicas: int, sync_every: int, steps: int, alpha: float, beta: float
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Trains; returns the centre and each replica's parameters, tensor by tensor."""
    models = [problem.model(0) for _ in range(replicas)]
    inner = [problem.inner(model.parameters()) for model in models]
    centre = [p.detach().clone() for p in models[0].parameters()]
    for step in range(steps):
        for m, model in enumerate(models):
            inner[m].zero_grad()
            problem.backward(model, m, step)
            inner[m].step()
        if (step + 1) % sync_every == 0:
            with torch.no_grad():
                for i, c in enumerate(centre):
                    own = [list(model.parameters())[i] for model in models]
                    c += beta * (sum(own) / replicas - c)
                    for p in own:
                        p.copy_((1 - alpha) * p + alpha * c)
    return centre, [[p.detach().clone() for p in model.parameters()] for model in models]
