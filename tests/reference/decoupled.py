"""Decoupled DiLoCo (arXiv 2604.21428): its average of displacements. The rest is streaming's.

`rda` is the paper's formula. `radial` is the same in the order in which it is computed over a sum-reduction: directions
are averaged (and, with a codec, encoded), lengths are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tests.reference.codecs import Mean
from tests.reference.streaming import Combine


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


def radial(embeddings: Collection[str] = ()) -> Combine:
    """For replicas of one weight; of ``embeddings`` the plain mean."""

    def combine(mean: Mean, fragment: int, names: Sequence[str], displacements: list[list[Tensor]]) -> list[Tensor]:
        if len(displacements) == 1:
            return mean(displacements, place=fragment, names=names)
        directed = [name not in embeddings for name in names]
        lengths = [[_length(v) for v in vs] for vs in displacements]
        sent = [
            [v * (1 / length) if yes and length else v for v, yes, length in zip(vs, directed, own, strict=True)]
            for vs, own in zip(displacements, lengths, strict=True)
        ]
        found = mean(sent, place=("directions", fragment), names=names)
        for i, direction in enumerate(found):
            if directed[i]:
                length, short = math.fsum(own[i] * (1 / len(lengths)) for own in lengths), _length(direction)
                found[i] = direction * (length / short if short >= 1e-3 else length)
        return found

    return combine


def _length(x: Tensor) -> float:
    return math.sqrt(math.fsum(value * value for value in x.reshape(-1).tolist()))
