"""PAFT (OpenReview cPZepCZlFW) as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.problems import Problem

Noise = Callable[[int, int, list[Tensor]], None]
"""(replica, step, gradients): spoils a replica's copy of the agreed gradient, in place."""


def paft(
    problem: Problem,
    *,
    replicas: int,
    sync_every: int,
    steps: int,
    noise: Noise,
    overlap: bool = False,
) -> list[list[Tensor]]:
    """Trains; returns each replica's parameters, tensor by tensor."""
    models = [problem.model(0) for _ in range(replicas)]
    inner = [problem.inner(model.parameters()) for model in models]
    snapshots: list[list[Tensor]] = []
    for step in range(1, steps + 1):
        gradients = []
        for m, model in enumerate(models):
            inner[m].zero_grad()
            problem.backward(model, m, step - 1)
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for m, model in enumerate(models):
            for i, p in enumerate(model.parameters()):
                mean = gradients[0][i] * (1 / replicas)
                for gradient in gradients[1:]:
                    mean = mean + gradient[i] * (1 / replicas)
                p.grad = mean
            noise(m, step, [p.grad for p in model.parameters() if p.grad is not None])
            inner[m].step()
        with torch.no_grad():
            if step % sync_every == 0:
                snapshots = [[p.detach().clone() for p in model.parameters()] for model in models]
            if snapshots and (step % sync_every == 0) != overlap:
                for i, parts in enumerate(zip(*snapshots, strict=True)):
                    mean = parts[0] * (1 / replicas)
                    for part in parts[1:]:
                        mean = mean + part * (1 / replicas)
                    for m, model in enumerate(models):
                        p = list(model.parameters())[i]
                        if overlap:
                            p.sub_(snapshots[m][i]).add_(mean)
                        else:
                            p.copy_(mean)
                snapshots = []
    return [[p.detach().clone() for p in model.parameters()] for model in models]
