"""Lookahead (arXiv 1907.08610, algorithm 1) as a plain loop: one model, slow weights phi, fast weights theta."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.problems import Problem


def lookahead(problem: Problem, *, k: int, alpha: float, steps: int) -> list[Tensor]:
    """Trains; returns phi, tensor by tensor. The inner optimizer's state is maintained."""
    model = problem.model(0)
    phi = [p.detach().clone() for p in model.parameters()]
    inner = problem.inner(model.parameters())
    for step in range(steps):
        inner.zero_grad()
        problem.backward(model, 0, step)
        inner.step()
        if (step + 1) % k == 0:
            with torch.no_grad():
                for i, theta in enumerate(model.parameters()):
                    phi[i] = phi[i] + alpha * (theta - phi[i])
                    theta.copy_(phi[i])
    return phi
