"""Error feedback: the part of a contribution that a codec left out is added to the next one.

Symbols: Delta is the outer gradient of a round, e the residual (zero at first), C a codec's encoding and decoding.

    v <- beta * e + Delta       what is offered
    the others get C(v)
    e <- v - C(v)               what was left out

With beta = 1 nothing is lost, only delayed: after any number of rounds the sum of all payloads sent differs from the
sum of all Deltas by e, the last round's error (and fp32 rounding). beta < 1 forgets old residuals.

A reduction does this part by part, while a part is in the cache (`Feedback.encode`). The new e is kept separately from
e: an attempt may fail and be repeated, and the new e takes effect only when the contribution is counted. A dropped
contribution does not change e.

The second hop of a reduction, the encoded sum, works the same way in the member that sends it (rank r, its span of the
sum S): it sends C(S + beta * o) and keeps o <- S + beta * o - C(S + beta * o), which it owes. Otherwise values that C
rounds to zero in the sum would never move, however often they are sent.

Each replica has its own e and o, like its inner optimizer's state; a newcomer begins with zero. They have the payload's
units, so neither a rebase, a fetched anchor nor payloads of other units (`Aggregation.units`) change them.

Source: SparseLoCo (arXiv 2508.15706): e <- beta * e + Delta, send C(e), e <- e - C(e). Its e before the subtraction is
our v. On both hops: DoubleSqueeze (arXiv 1905.05957), there with one server for the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ftopt.codecs import Codec


@dataclass(frozen=True, slots=True)
class Residual:
    """The accumulated error of all counted contributions.

    Args:
        own: e, of this replica's payloads, flat fp32; None: nothing yet.
        owed: o, of the sums that this replica has forwarded: the first element, and values from there on, fp32.
    """

    own: Tensor | None
    owed: tuple[int, Tensor]


@dataclass(frozen=True, slots=True)
class Feedback:
    """Error feedback of one attempt: the `Carry` of its reduction.

    Args:
        residual: e; 1-D, fp32, as long as the payload; does not change. None: nothing yet.
        beta: share of the residual that is kept, 0 to 1.
        left: like the payload; becomes the new e.
        room: makes memory for the new o, like the present one.
    """

    codec: Codec
    residual: Tensor | None
    beta: float
    left: Tensor
    room: Callable[[Tensor], Tensor] = torch.empty_like

    def encode(self, part: Tensor, start: int, out: Tensor | None) -> None:
        """Encodes ``v = beta * residual + part`` into ``out``; ``left <- v - C(v)``. ``part`` may become v."""
        where = slice(start, start + part.numel())
        carried, left = None if self.residual is None else self.residual[where], self.left[where]
        if carried is not None and self.beta != 1.0:
            carried = carried * self.beta
        if out is not None:
            self.codec.encode(part, out, left, carried)
            return
        left.zero_()
        if carried is not None:
            part.add_(carried)
