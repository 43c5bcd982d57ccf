"""What is usual: how large contributions and outer steps have been, so that one that is out of line is noticed.

The record is part of each fragment's outer state: agreed upon, under the digest, and fetched with it. So every replica
knows it, and a lone one can judge its own work. It keeps running maxima that fade slowly (`_KEPT`). The maxima of
contributions are per unit of rate and step, so that a rate that rises, a warm-up or a pause at rate 0 changes nothing.

With a limit of ``ratio`` (``sync.outlier_ratio``), a contribution is in line whatever the record says if it harms
nobody: if no element of it exceeds the greatest element of the first anchor, nor its norm a tenth of that anchor's; or
if neither exceeds twice what an optimizer moves that changes each element by its rate, as Adam does. An anchor without
an element of 1 (LoRA's B, gradients, small initial weights) counts as if it were scaled until it has one.

What exceeds these may be honest all the same: a loss leaves its plateau, or there is no record worth the name yet.
Peers that agree with it show that (`ftopt.sync.protocol.coordinator.rounds.outliers`). Where no peer can tell,
`Usual.alone` decides by the largest element: a flipped bit of an exponent is far beyond all that steps make.
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
from ftopt.step.tensors.flat import Together, alone
from ftopt.step.tensors.mapped import let_go
from ftopt.step.tensors.pieces import Measured, blocks_measured, is_finite, measure, piece_of
from ftopt.sync.group import floats

USUAL = "usual"
"""The outer state's name for the record: fp64, one number a field."""

_KEPT = 0.999
"""Of the record after each outer step: half of it after 693."""
_HARMLESS = 0.1
_REACHES = 2.0
"""A step changes an element by at most this many times the rate, where the rate says how large steps are."""
_MOST = 1e300  # a message has finite numbers


class Sizes(NamedTuple):
    """How large a contribution is: see `ftopt.sync.protocol.values.Contribution`."""

    steps: float
    norm: float
    peak: float
    behind: float
    reach: float

    @property
    def unit(self) -> float:
        """What it is compared per: its rates, or its steps where there is no rate."""
        return self.reach or max(1.0, self.steps)

    @property
    def rate(self) -> float:
        """The mean rate of its steps."""
        return self.reach / max(1.0, self.steps)


def sizes(steps: int, measured: Measured, reach: float) -> Sizes:
    """Of a contribution that is finite."""
    return Sizes(steps, measured.norm, measured.peak, measured.behind, reach)


class Told(NamedTuple):
    """What each member tells the others of its contribution at an outer step."""

    weight: float
    sizes: Sizes


def told_by(row: Sequence[int]) -> Told:
    """A member's row, as the reducer sends it: the last step, and these as fp64 bits."""
    weight, *rest = floats(row[1:])
    return Told(weight, Sizes(*rest))


@dataclass(frozen=True, slots=True)
class Usual:
    """The record of one fragment.

    Args:
        steps: inner steps of a contribution in the last round.
        norm, peak: of contributions, per `Sizes.unit`: the median of a round's, the running maximum over rounds.
        behind: the same, of the whole contribution.
        moved: the largest change of an element by an outer step, its running maximum.
        first_norm, first_peak: of the first anchor, scaled so that its largest element is 1 at least.
        root: of the number of elements.
        rate: of the steps of contributions, the median of a round's mean rates, its running maximum.
    """

    steps: float = 0.0
    norm: float = 0.0
    peak: float = 0.0
    behind: float = 0.0
    moved: float = 0.0
    first_norm: float = 0.0
    first_peak: float = 0.0
    root: float = 0.0
    rate: float = 0.0

    def rated(self, own: Sizes) -> float:
        """How many times the usual rate a contribution's mean rate is; 0: not known."""
        return min(own.rate / self.rate, _MOST) if self.rate else 0.0

    def excess(self, own: Sizes, ratio: float) -> float:
        """How many times the usual a contribution is. More than ``ratio``: out of line, unless its peers agree."""
        unit = self._unit(own)
        found = own.behind / max(self.behind * self._longer(own), 1.0 / ratio) if self.behind else 0.0
        reach = _REACHES * own.reach
        harmless = max(_HARMLESS * self.first_norm, reach * self.root), max(self.first_peak, reach)
        for value, usual, least in zip((own.norm, own.peak), (self.norm, self.peak), harmless, strict=True):
            if most := max(usual * unit, least / ratio):
                found = max(found, value / most)
        return min(found, _MOST)

    def alone(self, own: Sizes, ratio: float) -> float:
        """How many times as large a contribution is as its steps can make it, where no peer can tell. More than
        ``ratio``: out of line."""
        least = max(self.first_peak, own.reach)
        found = own.behind / max(self.behind * self._longer(own), ratio * ratio * ratio) if self.behind else 0.0
        most = max(self.peak * self._unit(own), least)
        if not (self.peak and own.reach):  # a first round, or gradients: a few steps may change their size by far
            most *= ratio * ratio
        return min(max(found, own.peak / most if most else 0.0), _MOST)

    def _unit(self, own: Sizes) -> float:
        """What the record is multiplied by. Fewer steps may move as far as many: these go to and fro."""
        return own.unit * max(1.0, self.steps / max(1.0, own.steps))

    def _longer(self, own: Sizes) -> float:
        return max(1.0, own.steps / self.steps) if self.steps else 1.0

    def allows(self, moved: float, members: Sequence[Told], ratio: float | None) -> bool:
        """Whether an outer step with contributions of these members may change an element by as much."""
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
            norm=min(max(_KEPT * self.norm, median_low(x.norm / x.unit for x in present)), _MOST),
            peak=min(max(_KEPT * self.peak, median_low(x.peak / x.unit for x in present)), _MOST),
            behind=max(_KEPT * self.behind, median_low(x.behind for x in present)),
            moved=max(_KEPT * self.moved, moved),
            rate=max(_KEPT * self.rate, median_low(x.rate for x in present)),
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
    norm = _rounded(math.sqrt(math.fsum(norm * norm for norm, _ in blocks)))
    peak = max((peak for _, peak in blocks), default=0.0)
    root = math.sqrt(max(1, sum(numel for numel, _ in found)))
    if not peak:
        norm, peak = root, 1.0
    scale = max(1.0, 1.0 / peak)
    return {USUAL: Usual(first_norm=scale * norm, first_peak=scale * peak, root=root).tensor()}


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
    return all(value <= ratio * its * longer for value, its in zip(own[1:4], dropped[1:4], strict=True))
