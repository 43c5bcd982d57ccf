"""Elementwise work on flat tensors, a piece at a time: all operations on a piece find it in the cache.

Ten operations over 50 million elements are ten sweeps through memory; in pieces they are one. Elementwise arithmetic
gives the same bits either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ftopt.methods import Method, Mine, Round
from ftopt.optimizer.digest import block_sums
from ftopt.optimizer.memory import Memory

_ON_CPU, _ELSEWHERE = 1 << 17, 1 << 24
"""Elements of a piece, a multiple of the digest's blocks: on a CPU half a dozen of them fit into the cache, and calls
cost a tenth of the time."""


def piece_of(flat: Tensor) -> int:
    """Elements of a piece of it."""
    return _ON_CPU if flat.device.type == "cpu" else _ELSEWHERE


def split(flat: Tensor) -> Sequence[Tensor]:
    """Its pieces, as views."""
    return torch.split(flat, piece_of(flat))


def is_finite(piece: Tensor) -> bool:
    """Whether all of it is. The norm says so in one sweep, unless it overflows."""
    return math.isfinite(float(torch.linalg.vector_norm(piece))) or bool(torch.isfinite(piece).all())


def distance(a: Tensor, b: Tensor) -> tuple[float, bool]:
    """The L2 norm of ``a - b``, and whether all of it is finite."""
    total, finite = 0.0, True
    scratch = torch.empty_like(split(a)[0])
    for x, y in zip(split(a), split(b), strict=True):
        apart = torch.sub(x, y, out=scratch[: x.numel()])
        norm = float(torch.linalg.vector_norm(apart))
        total += norm * norm
        finite = finite and (math.isfinite(norm) or bool(torch.isfinite(apart).all()))
    return math.sqrt(total), finite


def payload(method: Method, mine: Mine, out: Tensor, share: float | None) -> None:
    """``out <- share * payload``, of an elementwise method; ``share`` None: the payload."""
    alike = mine.start is mine.anchor
    anchors, params = split(mine.anchor), split(mine.params)
    starts = anchors if alike else split(mine.start)
    for anchor, start, now, place in zip(anchors, starts, params, split(out), strict=True):
        method.payload(replace(mine, anchor=anchor, start=start, params=now), place)
        if share is not None:
            place.mul_(share)


def outer_step(
    method: Method, anchor: Tensor, state: Mapping[str, Tensor], mean: Tensor, round: Round, memory: Memory
) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, dict[str, Tensor]]]:
    """`Method.outer_step` of an elementwise method.

    Returns:
        The anchor, in the memory of ``mean``; the state, in memory of its own; and the `block_sums` of both, taken
        while they are in the cache.
    """
    of_anchor, of_state = list[Tensor](), dict[str, list[Tensor]]()
    made, places = dict[str, Tensor](), dict[str, Sequence[Tensor]]()
    scalars = {name: tensor for name, tensor in state.items() if not tensor.dim()}
    parts = {name: split(tensor) for name, tensor in state.items() if tensor.dim()}
    for i, (old, place) in enumerate(zip(split(anchor), split(mean), strict=True)):
        own = {name: part[i] for name, part in parts.items()}
        new_anchor, new = method.outer_step(old, own | scalars, place, round)
        if new_anchor.data_ptr() != place.data_ptr():
            place.copy_(new_anchor)
        of_anchor.append(block_sums(place))
        for name, tensor in new.items():
            if not tensor.dim():
                made[name] = tensor
                continue
            if name not in made:
                made[name], of_state[name] = memory.take(mean.numel(), mean.device), []
                places[name] = split(made[name])
            places[name][i].copy_(tensor)
            of_state[name].append(block_sums(tensor))
    return mean, made, (torch.cat(of_anchor), {name: torch.cat(found) for name, found in of_state.items()})
