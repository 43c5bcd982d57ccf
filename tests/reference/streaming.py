"""Streaming DiLoCo (arXiv 2501.18512, algorithm 2) as a plain loop over explicit replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.problems import Problem
from tests.reference.codecs import Mean
from tests.reference.start import start

Combine = Callable[[Mean, int, Sequence[str], list[list[Tensor]]], list[Tensor]]
"""(how they average, fragment, names, each replica's displacements) -> the outer gradient, tensor by tensor."""


def streaming(
    problem: Problem,
    *,
    replicas: int,
    fragments: list[list[str]],
    sync_every: int,
    delay: int,
    steps: int,
    alpha: float | None = None,
    lr: float = 0.4,
    momentum: float = 0.9,
    outer_start: int = 0,
    combine: Combine | None = None,
    mean: Mean | None = None,
) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    """Trains; returns the global parameters by name, and each replica's own, tensor by tensor.

    Args:
        fragments: the names of each fragment's parameters; the offset of fragment p is ceil(p H / P).
        alpha: mixes; None rebases, which keeps the overlapped steps.
        outer_start: steps of plain averaging at the beginning; fragments are due at so many steps later.
        combine: makes the outer gradient of a fragment. Default: the mean.
        mean: how they average. Default: exactly.
    """
    mean = mean or Mean()
    models, inner = start(problem, mean, replicas=replicas, steps=outer_start, fragments=fragments)
    theta = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    velocity = {name: torch.zeros_like(t) for name, t in theta.items()}
    under_way: dict[tuple[int, int], list[dict[str, Tensor]]] = {}  # (step, fragment) -> snapshots
    for step in range(outer_start + 1, steps + 1):
        for m in range(replicas):
            inner[m].zero_grad()
            problem.backward(models[m], m, step - 1)
            inner[m].step()
        local = [dict(model.named_parameters()) for model in models]
        for p, names in enumerate(fragments):
            offset = math.ceil(p * sync_every / len(fragments))
            if (step - outer_start - offset) % sync_every == 0:
                snapshots = [{name: one[name].detach().clone() for name in names} for one in local]
                under_way[step, p] = snapshots
                displacements = [[theta[name] - snapshot[name] for name in names] for snapshot in snapshots]
                deltas = (
                    combine(mean, p, names, displacements) if combine else mean(displacements, place=p, names=names)
                )
                for name, delta in zip(names, deltas, strict=True):
                    velocity[name] = velocity[name] * momentum
                    velocity[name] = velocity[name] + delta
                    ahead = velocity[name] * momentum
                    ahead = ahead + delta
                    ahead = ahead * lr
                    theta[name] = theta[name] - ahead
            for one, snapshot in zip(local, under_way.pop((step - delay, p), []), strict=False):
                for name in names:
                    with torch.no_grad():
                        apart = one[name] - theta[name]
                        if alpha is None:
                            one[name].sub_(snapshot[name]).add_(theta[name])
                        elif alpha < 0.5:  # alpha p + (1 - alpha) theta; of equal ones exactly that
                            one[name].copy_(theta[name] + apart * alpha)
                        else:
                            one[name].copy_(one[name] - apart * (1 - alpha))
    return theta, [[p.detach().clone() for p in model.parameters()] for model in models]
