"""Error feedback: what a codec left out of one contribution goes with the next.

Letters: Delta the outer gradient of a round, e the residual (zero at first), C a codec's encoding and decoding.

    v <- beta * e + Delta       what is offered           `offered`
    the others get C(v)
    e <- v - C(v)               what was left out         `left_out`

With beta = 1 nothing is lost, only late: after any number of rounds the sum of all that was sent differs from the sum
of all Deltas by e, the last round's error (and fp32 rounding). beta < 1 forgets old residuals.

Both are pure, and meant to be computed once, when a contribution is frozen: an attempt may fail and be tried again with
the same v, and the new e counts only when the contribution is counted. One that is dropped leaves e as it was. The
second hop of a reduction, the encoded sum, is the same for all members and has no residual.

e is a replica's own, like its inner optimizer's state; a newcomer begins with zero. It has the outer gradient's units,
so a rebase or a fetched anchor does not change it.

Source: SparseLoCo (arXiv 2508.15706): e <- beta * e + Delta, send C(e), e <- e - C(e). Its e before the subtraction is
our v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ftopt.codecs import Codec, roundtrip


def offered(residual: Tensor, delta: Tensor, *, out: Tensor, beta: float = 1.0) -> Tensor:
    """``out <- beta * residual + delta``: what goes to the reduction in the place of ``delta``.

    Args:
        residual: e; 1-D, fp32.
        delta: the outer gradient, not multiplied by its share; like ``residual``.
        out: like ``residual``; may be ``delta``, not ``residual``.
        beta: how much of the residual is kept, 0 to 1. Default 1.

    Returns:
        ``out``. ``residual`` is not changed.
    """
    return torch.add(delta, residual if beta == 1.0 else residual * beta, out=out)


def left_out(payload: Tensor, codec: Codec, *, out: Tensor) -> Tensor:
    """``out <- payload - C(payload)``: the residual, once ``payload`` has been counted. Zeros for an exact codec.

    Args:
        payload: what `offered` gave, as it goes to the reduction: 1-D, contiguous, fp32, the whole of it, since blocks
            are counted from its beginning.
        codec: the reduction's codec.
        out: like ``payload``, and not it.

    Returns:
        ``out``. ``payload`` is not changed.

    Raises:
        FloatingPointError: ``payload`` is not finite.
    """
    if codec.exact:
        return out.zero_()
    return torch.sub(payload, roundtrip(codec, payload, out), out=out)
