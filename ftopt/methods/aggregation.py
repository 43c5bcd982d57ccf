"""Radial-directional averaging: the mean of the directions, at the mean of the lengths, tensor by tensor.

For members' displacements ``v_m`` of one tensor with weights ``w_m``, and ``phi(x) = x / |x|``, ``phi(0) = 0``:

    RDA = (sum_m w_m |v_m| / W) * phi(sum_m w_m phi(v_m) / W)

It is linear in ``phi(v_m)``: members send `directions_` to a sum-reduction and exchange the `lengths`, and each
computes the same result from the two means (`lengthened_`). A plain mean of different directions is shorter than they
are; RDA is not. Embeddings keep their plain mean: a row that a member has not used has no direction there.

Source: Decoupled DiLoCo (arXiv 2604.21428).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftopt.common.later import torch
from ftopt.methods.fragments import Layout, Span
from ftopt.methods.values import ReplicaView, Round

if TYPE_CHECKING:
    from torch import Tensor

CANCELLED = 1e-3
"""A mean of directions shorter than this has no direction: it is multiplied by the mean length without being
normalised. If all lengths are equal, this is the plain mean."""

DIRECTIONS = "directions"

_CHUNK = 1 << 20
_BITS = 62


@dataclass(frozen=True)
class RadialDirectional:
    """``RDA`` as an `Aggregation`: the scalars of a round are the `lengths`."""

    def units(self, view: ReplicaView) -> str:
        """The unit of directions, which are not displacements, or "" where displacements are sent."""
        return "" if view.alone or view.averages else DIRECTIONS

    def aggregate(self, mean: Tensor, round: Round) -> Tensor:
        if len(round.shares) == 1:
            return mean
        return lengthened_(mean, round.layout, [round.mean(i) for i in range(len(round.scalars[0]))])


def lengths(v: Tensor, layout: Layout) -> tuple[float, ...]:
    """``|v|`` of each tensor in ``v`` (flat fp32) except embeddings, in the layout's order."""
    return tuple(norm(v[span.start : span.stop]) for span in _directed(layout))


def directions_(v: Tensor, layout: Layout) -> Tensor:
    """``phi(v)`` of each tensor in ``v`` (flat fp32) except embeddings, in place."""
    for span in _directed(layout):
        part = v[span.start : span.stop]
        if length := norm(part):
            part.mul_(1 / length)
    return v


def lengthened_(mean: Tensor, layout: Layout, mean_lengths: Sequence[float]) -> Tensor:
    """RDA from the weighted means of `directions_` (flat fp32) and of `lengths`, in place.

    Bit-equal on all machines.
    """
    for span, length in zip(_directed(layout), mean_lengths, strict=True):
        part = mean[span.start : span.stop]
        found = norm(part)
        part.mul_(length / found if found >= CANCELLED else length)
    return mean


def norm(x: Tensor) -> float:
    """The L2 norm of a flat fp32 tensor, with the same bits on all machines, devices and numbers of threads.

    Squares are summed as integer multiples of 2^-41 of their chunk's largest, so that the order does not matter. The
    relative error is at most 1e-6, usually 1e-9.
    """
    total = []
    for chunk in torch.split(x, _CHUNK):
        largest = float(chunk.abs().max()) if chunk.numel() else 0.0
        if not math.isfinite(largest):
            return largest
        if largest:
            exponent = math.frexp(largest)[1]
            scaled = chunk.double().mul_(2.0**-exponent).square_()
            bits = _BITS - chunk.numel().bit_length()
            whole = int(scaled.mul_(2.0**bits).round_().long().sum())
            total.append(math.ldexp(whole, 2 * exponent - bits))
    return math.sqrt(math.fsum(total))


def _directed(layout: Layout) -> list[Span]:
    return [span for span in layout if not span.embedding]
