"""Error feedback: what a codec left out of one contribution goes with the next.

Letters: Delta the outer gradient of a round, e the residual (zero at first), C a codec's encoding and decoding.

    v <- beta * e + Delta       what is offered           `Feedback.before`
    the others get C(v)
    e <- v - C(v)               what was left out         `Feedback.after`

With beta = 1 nothing is lost, only late: after any number of rounds the sum of all that was sent differs from the sum
of all Deltas by e, the last round's error (and fp32 rounding). beta < 1 forgets old residuals.

A reduction does both a part after the other, while the part is in the cache (`Feedback`). e is not changed, the new one
is kept apart: an attempt may fail and be tried again, and the new e counts only when the contribution is counted. One
that is dropped leaves e as it was.

The second hop of a reduction, the encoded sum, is treated alike by the member that sends it (rank r, its span of the
sum S): it sends C(S + beta * o) and keeps o <- S + beta * o - C(S + beta * o), what it owes. Without that, values that
C makes zero in the sum would never move, however often they are sent.

e and o are a replica's own, like its inner optimizer's state; a newcomer begins with zero. They have the payload's
units, so a rebase or a fetched anchor does not change them, and payloads of other units (`Aggregation.units`) leave
them as they are.

Source: SparseLoCo (arXiv 2508.15706): e <- beta * e + Delta, send C(e), e <- e - C(e). Its e before the subtraction is
our v. On both hops: DoubleSqueeze (arXiv 1905.05957), there with one server for the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ftopt.codecs import Codec


@dataclass(frozen=True, slots=True)
class Residual:
    """What was left out of all that was counted.

    Args:
        own: e, of this replica's payloads, flat fp32; None: nothing yet.
        owed: o, of the sums that this replica sent on: the first element, and values from there on, fp32.
    """

    own: Tensor | None
    owed: tuple[int, Tensor]


@dataclass(frozen=True, slots=True)
class Feedback:
    """Error feedback of one attempt: the `Carry` of its reduction.

    Args:
        residual: e; 1-D, fp32, as long as the payload; is not changed. None: nothing yet.
        beta: how much of the residual is kept, 0 to 1.
        left: like the payload; becomes the new e.
    """

    codec: Codec
    residual: Tensor | None
    beta: float
    left: Tensor

    def before(self, part: Tensor, start: int) -> None:
        """``part <- beta * residual + part``."""
        if self.residual is not None:
            residual = self.residual[start : start + part.numel()]
            part.add_(residual if self.beta == 1.0 else residual * self.beta)

    def after(self, part: Tensor, start: int, encoded: Tensor | None) -> None:
        """``left <- part - C(part)``."""
        left = self.left[start : start + part.numel()]
        if encoded is None or self.codec.exact:
            left.zero_()
        else:
            torch.sub(part, self.codec.decode(encoded, left), out=left)
