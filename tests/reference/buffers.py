"""Averaging BatchNorm's statistics, as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


@torch.no_grad()
def average_buffers(models: Sequence[nn.Module]) -> None:
    """Floating-point buffers become their mean, summed in the order of the replicas; counters stay as they are."""
    for copies in zip(*(model.buffers() for model in models), strict=True):
        if copies[0].is_floating_point():
            mean = copies[0] * (1 / len(models))
            for copy in copies[1:]:
                mean = mean + copy * (1 / len(models))
            for copy in copies:
                copy.copy_(mean)
