"""Decoupled DiLoCo (arXiv 2604.21428): its average of displacements, written plainly. The rest is streaming's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def phi(x: Tensor) -> Tensor:
    """The direction; 0 of 0."""
    length = torch.linalg.vector_norm(x)
    return x / length if length > 0 else torch.zeros_like(x)


def rda(displacements: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """(sum w |v| / sum w) * phi(sum w phi(v) / sum w)."""
    total = sum(weights)
    length = sum(w * float(torch.linalg.vector_norm(v)) for w, v in zip(weights, displacements, strict=True)) / total
    direction = torch.zeros_like(displacements[0])
    for w, v in zip(weights, displacements, strict=True):
        direction = direction + w * phi(v) / total
    return length * phi(direction)
