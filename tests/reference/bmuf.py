"""BMUF (Chen and Huo, ICASSP 2016, section 3) as a plain loop over explicit replicas.

``G(t) = mean W(t) - W_g(t - 1)``, ``D(t) = eta D(t - 1) + zeta G(t)``, ``W(t) = W(t - 1) + D(t)``. The next block
starts at ``W_g(t) = W(t)`` (classical block momentum) or ``W(t) + eta D(t)`` (Nesterov's).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.problems import Problem


def bmuf(
    problem: Problem, *, replicas: int, block: int, steps: int, eta: float, zeta: float, nesterov: bool
) -> list[Tensor]:
    """Trains; returns W_g, tensor by tensor."""
    start = [p.detach().clone() for p in problem.model(0).parameters()]
    w = [t.clone() for t in start]
    d = [torch.zeros_like(t) for t in start]
    models = [problem.model(0) for _ in range(replicas)]
    inner = [problem.inner(model.parameters()) for model in models]
    for step in range(steps):
        for m in range(replicas):
            inner[m].zero_grad()
            problem.backward(models[m], m, step)
            inner[m].step()
        if (step + 1) % block:
            continue
        with torch.no_grad():
            for i, copies in enumerate(zip(*(model.parameters() for model in models), strict=True)):
                g = torch.stack([copy.detach() for copy in copies]).mean(dim=0) - start[i]
                d[i] = eta * d[i] + zeta * g
                w[i] = w[i] + d[i]
                start[i] = w[i] + eta * d[i] if nesterov else w[i].clone()
                for copy in copies:
                    copy.copy_(start[i])
    return start
