"""PAFT (OpenReview cPZepCZlFW) as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.problems import Problem
from tests.reference.codecs import Mean

Noise = Callable[[int, int, list[Tensor]], None]
"""(replica, step, gradients): spoils a replica's copy of the agreed gradient, in place."""

GRADIENTS, PARAMETERS = 0, 1


def paft(
    problem: Problem,
    *,
    replicas: int,
    sync_every: int,
    steps: int,
    noise: Noise = lambda replica, step, gradients: None,
    overlap: bool = False,
    outer_start: int = 0,
    mean: Mean | None = None,
) -> list[list[Tensor]]:
    """Trains; returns each replica's parameters, tensor by tensor.

    Args:
        overlap: parameters become the average of a step after the next one, whose work is kept.
        outer_start: steps at the beginning that are each followed by an average of the parameters, not overlapped.
        mean: how they average; a lossy one gets parameters as differences from their last average. Default: exactly.
    """
    mean = mean or Mean()
    models = [problem.model(0) for _ in range(replicas)]
    inner = [problem.inner(model.parameters()) for model in models]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    bases: list[list[Tensor]] = []  # what pending work is measured from: the snapshots, while an average is under way
    for step in range(1, steps + 1):
        gradients = []
        for m, model in enumerate(models):
            inner[m].zero_grad()
            problem.backward(model, m, step - 1)
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        agreed = mean(gradients, place=GRADIENTS)
        for m, model in enumerate(models):
            for p, g in zip(model.parameters(), agreed, strict=True):
                p.grad = g.clone()
            noise(m, step, [p.grad for p in model.parameters() if p.grad is not None])
            inner[m].step()
        with torch.no_grad():
            if bases:
                for model, base in zip(models, bases, strict=True):
                    for p, b, a in zip(model.parameters(), base, anchor, strict=True):
                        p.sub_(b).add_(a)
                bases = []
            starting = step <= outer_start
            if starting or (step - outer_start) % sync_every == 0:
                now = [[p.detach().clone() for p in model.parameters()] for model in models]
                if mean.lossy:
                    deltas = mean([[a - p for a, p in zip(anchor, own, strict=True)] for own in now], place=PARAMETERS)
                    anchor = [a - delta for a, delta in zip(anchor, deltas, strict=True)]
                else:
                    anchor = mean(now, place=PARAMETERS, values=True)
                if overlap and not starting:
                    bases = now
                else:
                    for model in models:
                        for p, a in zip(model.parameters(), anchor, strict=True):
                            p.copy_(a)
    return [[p.detach().clone() for p in model.parameters()] for model in models]
