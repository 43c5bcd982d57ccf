"""Synchronous data-parallel training as a plain loop: one model, the mean of the replicas' gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.problems import Problem
from tests.reference.codecs import Mean


def sync_sgd(
    problem: Problem, *, replicas: int, steps: int, clip_norm: float | None = None, mean: Mean | None = None
) -> list[Tensor]:
    """Trains; returns the parameters, tensor by tensor. ``mean``: how gradients are averaged. Default: exactly."""
    mean = mean or Mean()
    model = problem.model(0)
    inner = problem.inner(model.parameters())
    for step in range(steps):
        gradients = []
        for m in range(replicas):
            inner.zero_grad()
            problem.backward(model, m, step)
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for p, g in zip(model.parameters(), mean(gradients), strict=True):
            p.grad = g
        if clip_norm is not None:
            norm = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            norm = norm.double().norm().float()
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad * min(1.0, clip_norm / (float(norm) + 1e-6))
        inner.step()
    return [p.detach().clone() for p in model.parameters()]
