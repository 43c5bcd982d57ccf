"""Error feedback: what a codec left out of one contribution goes with the next.

Letters: Delta the outer gradient of a round, e the residual (zero at first), C a codec's encoding and decoding.

    v <- beta * e + Delta       what is offered           `offered`
    the others get C(v)
    e <- v - C(v)               what was left out         `left_out`

With beta = 1 nothing is lost, only late: after any number of rounds the sum of all that was sent differs from the sum
of all Deltas by e, the last round's error (and fp32 rounding). beta < 1 forgets old residuals.

Both are pure, and meant to be computed once, when a contribution is frozen: an attempt may fail and be tried again with
the same v, and the new e counts only when the contribution is counted. One that is dropped leaves e as it was.

The second hop of a reduction, the encoded sum, is treated alike by the member that sends it (rank r, its span of the
sum S): it sends C(S + beta * o) and keeps o <- S + beta * o - C(S + beta * o), what it owes. Without that, values that
C makes zero in the sum would never move, however often they are sent.

e and o are a replica's own, like its inner optimizer's state; a newcomer begins with zero. They have the payload's
units, so a rebase or a fetched anchor does not change them, and payloads of other units (`Method.units`) leave them as
they are.

Source: SparseLoCo (arXiv 2508.15706): e <- beta * e + Delta, send C(e), e <- e - C(e). Its e before the subtraction is
our v. On both hops: DoubleSqueeze (arXiv 1905.05957), there with one server for the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ftopt.codecs import Codec, roundtrip


@dataclass(frozen=True, slots=True)
class Residual:
    """What was left out of all that was counted.

    Args:
        own: e, of this replica's payloads, flat fp32; None: nothing yet.
        owed: o, of the sums that this replica sent on: the first element, and values from there on, fp32.
    """

    own: Tensor | None
    owed: tuple[int, Tensor]


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
