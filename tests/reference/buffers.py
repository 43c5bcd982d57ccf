"""Averaging BatchNorm's statistics, as a plain loop over explicit replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.reference.codecs import mean_of_values


@torch.no_grad()
def average_buffers(models: Sequence[nn.Module]) -> None:
    """Floating-point buffers become their mean, in the order of the replicas; counters stay as they are."""
    for copies in zip(*(model.buffers() for model in models), strict=True):
        if copies[0].is_floating_point():
            mean = mean_of_values(copies, [1 / len(models)] * len(models))
            for copy in copies:
                copy.copy_(mean)
