"""What is usual: how large contributions and outer steps have been, so that one that is out of line is noticed.

The record is part of each fragment's outer state: agreed upon, under the digest, and fetched with it. So every replica
knows it, and a lone one can judge its own work. It keeps running maxima that fade slowly (`_KEPT`), since what has been
honest once may come again: after a warm restart of the learning rate, or a pause at rate 0.

With a limit of ``ratio`` (``sync.outlier_ratio``), a contribution is in line whatever the record says if no element of
it exceeds the greatest element of the first anchor, nor its norm a tenth of that anchor's: it harms nobody. Where that
anchor is 0 (LoRA's B, gradients), its elements count as 1. Before the first round that has moved anything, it may be
``ratio`` times these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from ftopt.methods import GRADIENT
from ftopt.optimizer.tensors.flat import Together, alone
from ftopt.optimizer.tensors.mapped import let_go
from ftopt.optimizer.tensors.pieces import Measured, blocks_measured, is_finite, measure, piece_of
from ftopt.sync.group import floats

USUAL = "usual"
"""The outer state's name for the record: fp64, one number a field."""

_KEPT = 0.999
"""Of the record after each outer step: half of it after 693."""
_HARMLESS = 0.1
_MOST = 1e300  # a message has finite numbers


class Sizes(NamedTuple):
    """How large a contribution is: see `ftopt.sync.protocol.values.Contribution`."""

    steps: float
    norm: float
    peak: float
    behind: float


def sizes(steps: int, measured: Measured) -> Sizes:
    """Of a contribution that is finite."""
    return Sizes(steps, measured.norm, measured.peak, measured.behind)


class Told(NamedTuple):
    """What each member tells the others of its contribution at an outer step."""

    weight: float
    sizes: Sizes


def told(row: Sequence[int]) -> Told:
    """A member's row, as the reducer sends it: the last step, and these as fp64 bits."""
    weight, *rest = floats(row[1:])
    return Told(weight, Sizes(*rest))


@dataclass(frozen=True, slots=True)
class Usual:
    """The record of one fragment.

    Args:
        steps: inner steps of a contribution in the last round.
        norm, peak, behind: of contributions, the median of a round's, the running maximum over rounds.
        moved: the largest change of an element by an outer step, likewise.
        first_norm, first_peak: of the first anchor; as if its elements were 1 where all are 0.
    """

    steps: float = 0.0
    norm: float = 0.0
    peak: float = 0.0
    behind: float = 0.0
    moved: float = 0.0
    first_norm: float = 0.0
    first_peak: float = 0.0

    def excess(self, own: Sizes, ratio: float) -> float:
        """How many times the usual a contribution is; 0 when nothing is known. More than ``ratio``: out of line."""
        longer = max(1.0, own.steps / self.steps) if self.steps else 1.0
        found = own.behind / (self.behind * longer) if self.behind else 0.0
        firsts = _HARMLESS * self.first_norm, self.first_peak
        for value, usual, first in zip((own.norm, own.peak), (self.norm, self.peak), firsts, strict=True):
            if usual:
                found = max(found, value / max(usual * longer, first / ratio))
            elif first and value > ratio * first:
                found = max(found, value / first)
        return min(found, _MOST)

    def allows(self, moved: float, members: Sequence[Told], ratio: float | None) -> bool:
        """Whether an outer step with contributions of these members may change an element by so much."""
        if not math.isfinite(moved):
            return False
        usual = max([self.moved, *(member.sizes.peak for member in members if member.weight > 0)])
        return ratio is None or not usual or moved <= max(ratio * usual, self.first_peak)

    def after(self, members: Sequence[Told], moved: float) -> Usual:
        """The record after such an outer step."""
        present = [member.sizes for member in members if member.weight > 0]
        return replace(
            self,
            steps=median_low(x.steps for x in present),
            norm=max(_KEPT * self.norm, median_low(x.norm for x in present)),
            peak=max(_KEPT * self.peak, median_low(x.peak for x in present)),
            behind=max(_KEPT * self.behind, median_low(x.behind for x in present)),
            moved=max(_KEPT * self.moved, moved),
        )

    def tensor(self) -> Tensor:
        """As it lies in the outer state."""
        return torch.tensor(astuple(self), dtype=torch.float64)


def usual_of(outer: Mapping[str, Tensor]) -> Usual:
    """The record in an outer state."""
    return Usual(*outer[USUAL].tolist())


def moved(before: Tensor, after: Tensor, outer: Mapping[str, Tensor]) -> float:
    """The largest change of an element of the anchor, or the largest element of an agreed gradient; inf if anything is
    not finite. ``outer``: the method's own outer state after it."""
    gradient, measured, size = outer.get(GRADIENT), Measured(), piece_of(before)
    if gradient is not None:
        measured = measure(gradient)
    else:
        for old, new in zip(torch.split(before, size), torch.split(after, size), strict=True):
            measured.see(torch.sub(new, old))
            let_go(old, new)
    finite = measured.finite and all(is_finite(tensor) for tensor in outer.values())
    return measured.peak if finite else math.inf


def first_usual(anchor: Tensor, together: Together = alone) -> dict[str, Tensor]:
    """The part of the outer state that is the record, at version 0. ``anchor``: flat fp32, without buffers."""
    found = together((anchor.numel(), blocks_measured(anchor)))
    blocks = [block for _, each in found for block in each]
    first = Usual(
        first_norm=_rounded(math.sqrt(math.fsum(norm * norm for norm, _ in blocks))),
        first_peak=max((peak for _, peak in blocks), default=0.0),
    )
    if not first.first_peak:
        first = Usual(first_norm=math.sqrt(sum(numel for numel, _ in found)), first_peak=1.0)
    return {USUAL: first.tensor()}


def _rounded(value: float) -> float:
    """To 24 bits: replicas whose processors or devices add up in another order begin with the same record."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * (1 << 24)), exponent - 24)


def resembles(own: Sizes, dropped: Sizes | None, usual: Usual, ratio: float) -> bool:
    """Whether a contribution is as large as work that its holder has ``dropped`` because it was out of line, and of a
    size that parameters may have: then it was no flipped bit."""
    if dropped is None or not own.peak <= ratio * ratio * max(1.0, usual.first_peak):
        return False
    longer = max(1.0, own.steps / max(1.0, dropped.steps))
    return all(value <= ratio * its * longer for value, its in zip(own[1:], dropped[1:], strict=True))
