"""Replicas, and the synchronous training with which post-local methods begin (arXiv 1808.07217)."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from tests.problems import Problem


def start(
    problem: Problem, *, replicas: int, steps: int, whole: bool = False
) -> tuple[list[nn.Module], list[Optimizer]]:
    """Models and inner optimizers after ``steps`` steps, each followed by an average of the parameters.

    Args:
        whole: the parameters are averaged; else their differences from the last average are.
    """
    models = [problem.model(0) for _ in range(replicas)]
    inner = [problem.inner(model.parameters()) for model in models]
    theta = [p.detach().clone() for p in models[0].parameters()]
    for step in range(steps):
        for m in range(replicas):
            inner[m].zero_grad()
            problem.backward(models[m], m, step)
            inner[m].step()
        with torch.no_grad():
            for i, copies in enumerate(zip(*(model.parameters() for model in models), strict=True)):
                parts = [copy if whole else theta[i] - copy for copy in copies]
                mean = parts[0] * (1 / replicas)
                for part in parts[1:]:
                    mean = mean + part * (1 / replicas)
                theta[i] = mean if whole else theta[i] - mean
                for copy in copies:
                    copy.copy_(theta[i])
    return models, inner
