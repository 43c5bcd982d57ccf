"""SNOO (step-K Nesterov outer optimizer) as a plain loop: one model, every K steps a Nesterov step on its
displacement."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.problems import Problem


def snoo(problem: Problem, *, k: int, eta: float, mu: float, steps: int) -> list[Tensor]:
    """Trains; returns the slow weights, tensor by tensor."""
    model = problem.model(0)
    slow = [p.detach().clone() for p in model.parameters()]
    b = [torch.zeros_like(t) for t in slow]
    inner = problem.inner(model.parameters())
    for step in range(steps):
        inner.zero_grad()
        problem.backward(model, 0, step)
        inner.step()
        if (step + 1) % k == 0:
            with torch.no_grad():
                for i, fast in enumerate(model.parameters()):
                    pseudo_gradient = slow[i] - fast
                    b[i] = mu * b[i] + pseudo_gradient
                    slow[i] = slow[i] - eta * (pseudo_gradient + mu * b[i])
                    fast.copy_(slow[i])
    return slow
