"""The usual sizes of contributions and outer steps, by which those out of line are detected.

The record is part of each fragment's outer state: agreed, under the digest, and fetched with it. So every replica knows
it, and a lone one can judge its own work. It keeps running maxima that decay slowly (`_KEPT`). The maxima of
contributions are per unit of rate and step, so that a rising rate, a warm-up or a pause at rate 0 changes nothing.

With a limit of ``ratio`` (``policy.outlier_ratio``), a harmless contribution is in line whatever the record: one in
which no element exceeds the largest element of the first anchor, and the norm does not exceed a tenth of that anchor's;
or in which neither exceeds twice the movement of an optimizer that changes each element by its rate, as Adam does. An
anchor without an element of 1 (LoRA's B, gradients, small initial weights) counts as if it were scaled until it has
one.

Larger contributions may still be honest: a loss leaves its plateau, or the record is too short. Peers that agree with
one show that (`ftopt.sync.protocol.coordinator.rounds.outliers`). Without such peers, `Usual.alone` decides by the
largest element: a flipped bit of an exponent is far beyond all that steps make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from ftopt.methods.sync_sgd import GRADIENT
from ftopt.step.tensors.digest import largest
from ftopt.step.tensors.flat import Together, alone
from ftopt.step.tensors.mapped import let_go
from ftopt.step.tensors.pieces import Measured, blocks_measured, is_finite, piece_of
from ftopt.sync.group import floats

USUAL = "usual"
"""The outer state's name for the record: fp64, one number per field."""

_KEPT = 0.999
"""Share of the record kept at each outer step: half remains after 693."""
_HARMLESS = 0.1
_REACHES = 2.0
"""A step changes an element by at most this many times the rate, if the rate determines the size of steps."""
_MOST = 1e300  # messages allow only finite numbers


class Sizes(NamedTuple):
    """The sizes of a contribution: see `ftopt.sync.protocol.values.Contribution`."""

    steps: float
    norm: float
    peak: float
    behind: float
    reach: float

    @property
    def unit(self) -> float:
        """The unit of comparison: the sum of its rates, or its steps if there is no rate."""
        return self.reach or max(1.0, self.steps)

    @property
    def rate(self) -> float:
        """The mean rate of its steps."""
        return self.reach / max(1.0, self.steps)


def sizes(steps: int, measured: Measured, reach: float) -> Sizes:
    """The sizes of a finite contribution."""
    return Sizes(steps, measured.norm, measured.peak, measured.behind, reach)


class Told(NamedTuple):
    """The data about its contribution that each member sends the others at an outer step."""

    weight: float
    sizes: Sizes


def told_by(row: Sequence[int]) -> Told:
    """Decodes a member's row as sent by the reducer: the last step, and these numbers as fp64 bits."""
    weight, *rest = floats(row[1:])
    return Told(weight, Sizes(*rest))


class Usual(NamedTuple):
    """The record of one fragment.

    Args:
        steps: inner steps of a contribution in the last round.
        norm, peak: of contributions, per `Sizes.unit`: the running maximum over rounds of each round's median.
        behind: the same, of the whole contribution.
        moved: the running maximum of the largest change of an element by an outer step.
        first_norm, first_peak: of the first anchor, scaled so that its largest element is at least 1.
        root: the square root of the number of elements.
        rate: the running maximum of each round's median of the contributions' mean rates.
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
        """The ratio of a contribution's mean rate to the usual rate; 0: not known."""
        return min(own.rate / self.rate, _MOST) if self.rate else 0.0

    def excess(self, own: Sizes, ratio: float) -> float:
        """The ratio of a contribution's size to the usual size. More than ``ratio``: out of line, unless its peers
        agree."""
        unit = self._unit(own)
        found = own.behind / max(self.behind * self._longer(own), 1.0 / ratio) if self.behind else 0.0
        reach = _REACHES * own.reach
        harmless = max(_HARMLESS * self.first_norm, reach * self.root), max(self.first_peak, reach)
        for value, usual, least in zip((own.norm, own.peak), (self.norm, self.peak), harmless, strict=True):
            if most := max(usual * unit, least / ratio):
                found = max(found, value / most)
        return min(found, _MOST)

    def alone(self, own: Sizes, ratio: float) -> float:
        """The ratio of a contribution's size to the largest that its steps can make, for use without peers. More than
        ``ratio``: out of line."""
        least = max(self.first_peak, own.reach)
        found = own.behind / max(self.behind * self._longer(own), ratio * ratio * ratio) if self.behind else 0.0
        most = max(self.peak * self._unit(own), least)
        if not (self.peak and own.reach):  # in a first round, or for gradients, a few steps may change the size greatly
            most *= ratio * ratio
        return min(max(found, own.peak / most if most else 0.0), _MOST)

    def _unit(self, own: Sizes) -> float:
        """The record's factor. Fewer steps may move as far as many, which partly cancel."""
        return own.unit * max(1.0, self.steps / max(1.0, own.steps))

    def _longer(self, own: Sizes) -> float:
        return max(1.0, own.steps / self.steps) if self.steps else 1.0

    def allows(self, moved: float, members: Sequence[Told], ratio: float | None) -> bool:
        """Whether an outer step with contributions of these members may change an element by ``moved``."""
        if not math.isfinite(moved):
            return False
        usual = max([self.moved, *(member.sizes.peak for member in members if member.weight > 0)])
        return ratio is None or not usual or moved <= max(ratio * usual, self.first_peak)

    def after(self, members: Sequence[Told], moved: float) -> Usual:
        """The record after an outer step with these members."""
        present = [member.sizes for member in members if member.weight > 0]
        return self._replace(
            steps=median_low(x.steps for x in present),
            norm=min(max(_KEPT * self.norm, median_low(x.norm / x.unit for x in present)), _MOST),
            peak=min(max(_KEPT * self.peak, median_low(x.peak / x.unit for x in present)), _MOST),
            behind=max(_KEPT * self.behind, median_low(x.behind for x in present)),
            moved=max(_KEPT * self.moved, moved),
            rate=max(_KEPT * self.rate, median_low(x.rate for x in present)),
        )

    def tensor(self) -> Tensor:
        """The record as a tensor of the outer state."""
        return torch.tensor(self, dtype=torch.float64)


def usual_of(outer: Mapping[str, Tensor]) -> Usual:
    """The record in an outer state."""
    return Usual(*outer[USUAL].tolist())


def moved(before: Tensor, after: Tensor, outer: Mapping[str, Tensor]) -> float:
    """The largest change of an element of the anchor, or the largest element of an agreed gradient; inf if anything is
    not finite. ``outer``: the method's own outer state after the step."""
    gradient, peak, size = outer.get(GRADIENT), 0.0, piece_of(before)
    for piece in torch.split(gradient, size) if gradient is not None else ():
        peak = max(peak, largest(piece))
        let_go(piece)
    for old, new in zip(torch.split(before, size), torch.split(after, size), strict=True) if gradient is None else ():
        peak = max(peak, largest(torch.sub(new, old)))
        let_go(old, new)
    return peak if math.isfinite(peak) and all(is_finite(tensor) for tensor in outer.values()) else math.inf


def first_usual(anchor: Tensor, together: Together = alone) -> dict[str, Tensor]:
    """The record's part of the outer state, at version 0. ``anchor``: flat fp32, without buffers."""
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
    """Rounded to 24 bits, so that replicas whose processors or devices sum in different orders begin with the same
    record."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * (1 << 24)), exponent - 24)


def resembles(own: Sizes, dropped: Sizes | None, usual: Usual, ratio: float) -> bool:
    """Whether a contribution is of similar size to work that its replica has ``dropped`` as out of line, and of a size
    that parameters may have: then no flipped bit was the cause."""
    if dropped is None or not own.peak <= ratio * ratio * max(1.0, usual.first_peak):
        return False
    longer = max(1.0, own.steps / max(1.0, dropped.steps))
    return all(value <= ratio * its * longer for value, its in zip(own[1:4], dropped[1:4], strict=True))
