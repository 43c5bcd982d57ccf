"""SlowMo (arXiv 1910.00643, algorithm 1, base local SGD) as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from tests.problems import Problem
from tests.reference.codecs import Mean
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
    mean: Mean | None = None,
) -> list[Tensor]:
    """Trains; returns x_0, tensor by tensor.

    The paper's gamma_t is one rate a round; where the rate moves within the round, it is their mean here: then the
    displacement, a sum over the steps, is divided by the sum of their rates.

    Args:
        buffers: of the base optimizers at each round: ``keep``, ``reset`` (they are made anew), or ``average``.
        rate: the inner rate after so many steps; None: the optimizer's own.
        outer_start: steps of plain averaging at the beginning.
        mean: how they average. Default: exactly. (Averaging buffers through a codec is not written down here.)
    """
    mean = mean or Mean()
    models, base = start(problem, mean, replicas=replicas, steps=outer_start)
    x = [p.detach().clone() for p in models[0].parameters()]
    u = [torch.zeros_like(t) for t in x]
    rates: list[Fraction] = []  # of the round's steps
    for step in range(outer_start, steps):
        for m in range(replicas):
            if rate is not None:
                base[m].param_groups[0]["lr"] = rate(step)
            base[m].zero_grad()
            problem.backward(models[m], m, step)
            base[m].step()
        rates.append(Fraction(base[0].param_groups[0]["lr"]))
        if (step + 1 - outer_start) % sync_every:
            continue
        gamma, rates = float(sum(rates) / len(rates)), []
        with torch.no_grad():
            deltas = mean([[t - p for t, p in zip(x, model.parameters(), strict=True)] for model in models])
            for i, delta in enumerate(deltas):
                if gamma == 0:
                    x[i] = x[i] - delta * alpha
                else:
                    u[i] = u[i] * beta
                    u[i] = u[i] + delta * (1 / gamma)
                    x[i] = x[i] - u[i] * (alpha * gamma)
                for model in models:
                    list(model.parameters())[i].copy_(x[i])
        if buffers == "reset":
            base = [problem.inner(model.parameters()) for model in models]
        elif buffers == "average":
            for copies in zip(*(optimizer.state.values() for optimizer in base), strict=True):
                for key in copies[0].keys() - {"step"}:
                    (average,) = mean([[copy[key]] for copy in copies], values=True)
                    for copy in copies:
                        copy[key].copy_(average)
    return x
