"""The triggers' measurements of one fragment: norms, the direction of the last outer step, the members' statistics.

Sums of squares are fp64 over fp32 differences: where the replicas' common movement is large, their divergence is the
small difference of two large numbers, of which fp32 would not keep a digit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

import torch
from torch import Tensor

from ftopt.methods import Method, ReplicaView, own_code
from ftopt.methods.triggers import AT_MEAN, AT_ROUNDS, Measurement, Measurements, MemberStats, RoundStats
from ftopt.step.outer.counters import StepTotals
from ftopt.step.outer.usual import USUAL
from ftopt.step.tensors.buffers import of
from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.gradients import PRESENT

AGREED = "agreed"
"""The outer state's name for `RoundStats`: fp64, one number per field."""
RESERVED = AGREED, PRESENT, USUAL
"""Names in an outer state that are not the method's own."""
_NOTHING = RoundStats()
_CPU_CHUNK, _CHUNK = 1 << 16, 1 << 24
"""Elements processed at a time: on a CPU they fit in the cache; elsewhere they need few launches and little memory."""


def dot(a: Tensor, b: Tensor) -> float:
    """``<a, b>`` of flat tensors, summed in fp64, without an fp64 copy of the whole."""
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    size = _CPU_CHUNK if a.device.type == "cpu" else _CHUNK
    for x, y in zip(torch.split(a, size), torch.split(b, size), strict=True):
        wide = x.double()
        total += torch.dot(wide, wide if a is b else y.double())
    return float(total)


class TriggerMetrics:
    """The measurements of one fragment.

    Args:
        uses: all numbers that the method's trigger may use; only these are measured.

    Attributes:
        direction: xi, of the last outer step; None if unknown. Training thread.
        learns: whether members exchange statistics at an outer step.
    """

    def __init__(self, view: FlatView, uses: Measurement) -> None:
        self._view, self._uses = view, uses
        self.direction: Tensor | None = None
        self.learns = bool(uses & AT_ROUNDS)
        self._read: tuple[object, RoundStats] = (None, RoundStats())

    # Between two outer steps. Training thread.

    def look(self, wanted: Measurement, start: Tensor, out: Tensor) -> Measurements:
        """Measures the ``wanted`` numbers of ``u = params - start``; ``out`` is overwritten. All are flat fp32."""
        u = self._trained(self._view.read(out).sub_(start))
        total, known = self._view.total, Measurement.ALONG in wanted and self.direction is not None
        along = total(dot(u, self.direction)) if known and self.direction is not None else None
        return Measurements(total(dot(u, u)) if Measurement.SQUARE in wanted else None, along)

    def moved(self, before: Tensor, after: Tensor, versions: int) -> None:
        """Updates ``direction`` for an anchor ``versions`` after ``before``; only that of neighbours is the others'
        ``xi``."""
        if Measurement.ALONG not in self._uses or not versions:
            return
        self.direction = None
        if versions == 1:
            step = torch.sub(self._trained(after), self._trained(before))
            norm = math.sqrt(self._view.total(dot(step, step)))
            self.direction = step.div_(norm) if norm > 0 and math.isfinite(norm) else None

    def seen(self, now: StepTotals, base: StepTotals) -> MemberStats:
        """The statistics of a contribution for the other members, as far as they are known when it is frozen."""
        gradient = self._view.gradient_norm() if Measurement.GRADIENT in self._uses else None
        loss = now.mean_loss(base) if Measurement.LOSS in self._uses else None
        pace = now.pace(base) if Measurement.PACE in self._uses else None
        return MemberStats(0.0, loss, gradient, pace=pace)

    # At an outer step. Reducer thread.

    def at_mean(self, seen: MemberStats, method: Method, view: ReplicaView, mean: Tensor) -> MemberStats:
        """Adds the measurements on the ``mean`` of the payloads: its squared distances from this replica's payload, and
        from the payload of a replica that has not moved."""
        if not self._uses & AT_MEAN:
            return seen
        view, mean = of(view, slice(0, self._view.trained)), self._trained(mean)
        apart = torch.empty_like(mean)

        def square(view: ReplicaView) -> float:
            difference = own_code.payload(method, view, apart).sub_(mean)
            return self._view.total(dot(difference, difference))

        distance = square(view) if Measurement.DISTANCE in self._uses else None
        displacement = square(replace(view, params=view.start)) if Measurement.DISPLACEMENT in self._uses else None
        return replace(seen, distance=distance, displacement=displacement)

    def _trained(self, flat: Tensor) -> Tensor:
        return flat[: self._view.trained]  # without buffers, whose movement is not divergence

    def after(self, outer: Mapping[str, Tensor], seen: tuple[MemberStats, ...]) -> dict[str, Tensor]:
        """The triggers' part of the outer state, after an outer step with these statistics."""
        return {AGREED: _tensor(_agreed(outer[AGREED]).after(seen))} if self.learns else {}

    def agreed(self, outer: Mapping[str, Tensor]) -> RoundStats:
        """The statistics that the members of the last outer step agreed on. Training thread; cheap to call at every
        step."""
        if not self.learns:
            return _NOTHING
        if self._read[0] is not outer:
            self._read = (outer, _agreed(outer[AGREED]))
        return self._read[1]


def first_agreed(uses: Measurement) -> dict[str, Tensor]:
    """The triggers' part of the outer state, at version 0."""
    return {AGREED: _tensor(_NOTHING)} if uses & AT_ROUNDS else {}


def methods_own(outer: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The method's part of an outer state."""
    return {name: tensor for name, tensor in outer.items() if name not in RESERVED}


def pack(record: RoundStats | MemberStats) -> list[float]:
    """The fields as numbers; NaN for None."""
    return [math.nan if value is None else float(value) for value in astuple(record)]


def seen_of(row: Sequence[float]) -> MemberStats:
    """The inverse of `pack`."""
    weight, *rest = row
    return MemberStats(weight, *map(_known, rest))


def _tensor(agreed: RoundStats) -> Tensor:
    return torch.tensor(pack(agreed), dtype=torch.float64)


def _agreed(tensor: Tensor) -> RoundStats:
    members, *rest = tensor.tolist()
    return RoundStats(members, *map(_known, rest))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
