"""SlowMo (arXiv 1910.00643, algorithm 1, base local SGD) as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.problems import Problem
from tests.reference.start import start


def slowmo(
    problem: Problem,
    *,
    replicas: int,
    sync_every: int,
    steps: int,
    alpha: float,
    beta: float,
    buffers: str = "keep",
    rate: Callable[[int], float] | None = None,
    outer_start: int = 0,
) -> list[Tensor]:
    """Trains; returns x_0, tensor by tensor.

    Args:
        buffers: of the base optimizers at each round: ``keep``, ``reset`` (they are made anew), or ``average``.
        rate: the inner rate after so many steps; None: the optimizer's own.
        outer_start: steps of plain averaging at the beginning.
    """
    models, base = start(problem, replicas=replicas, steps=outer_start)
    x = [p.detach().clone() for p in models[0].parameters()]
    u = [torch.zeros_like(t) for t in x]
    for step in range(outer_start, steps):
        for m in range(replicas):
            if rate is not None:
                base[m].param_groups[0]["lr"] = rate(step)
            base[m].zero_grad()
            problem.backward(models[m], m, step)
            base[m].step()
        if (step + 1 - outer_start) % sync_every:
            continue
        gamma = base[0].param_groups[0]["lr"]
        with torch.no_grad():
            for i, copies in enumerate(zip(*(model.parameters() for model in models), strict=True)):
                delta = (x[i] - copies[0]) * (1 / replicas)
                for copy in copies[1:]:
                    delta = delta + (x[i] - copy) * (1 / replicas)
                if gamma == 0:
                    x[i] = x[i] - delta * alpha
                else:
                    u[i] = u[i] * beta
                    u[i] = u[i] + delta * (1 / gamma)
                    x[i] = x[i] - u[i] * (alpha * gamma)
                for copy in copies:
                    copy.copy_(x[i])
        if buffers == "reset":
            base = [problem.inner(model.parameters()) for model in models]
        elif buffers == "average":
            for copies in zip(*(optimizer.state.values() for optimizer in base), strict=True):
                for key in copies[0].keys() - {"step"}:
                    mean = copies[0][key] * (1 / replicas)
                    for copy in copies[1:]:
                        mean = mean + copy[key] * (1 / replicas)
                    for copy in copies:
                        copy[key].copy_(mean)
    return x
