"""How the global batch of a gradient method is shared out, and again when a replica fails.

A *plan* says which replica computes the gradients of which units. Every unit has one owner, and a replica's gradients
are the sum over the units of its share. So the sum over all replicas is the batch's, whichever failed in between:

- BATCH: version ``v + 1`` is made of all the units ``[v B, (v + 1) B)``. The version is the cursor; nothing is leased.
- PLAN: a lost replica loses its share; the next plan adds it to the others' shares, first to those that will be done
  soonest. No plan is issued while an attempt is undecided.
- OWN (`Portion`): a replica whose sum has a unit that now belongs to another replica drops it all, since a sum cannot
  be taken apart; any other replica keeps its sum, and adds to it.
- COVER: a quorum forms only from contributions of the newest plan that make up the batch, each unit once.
- TIE: gradients belong to one version: those of another are dropped.
- RESTART: a coordinator that starts leaves replicas the shares that they report; if two claim the same unit, the one
  with the newer plan keeps all of its share.

Source: torchft's issue 192 (keep the survivors' gradients) and 186 (a constant global batch).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftopt.sync.protocol.intervals import Ranges, contains, first, intersect, size, subtract, union
from ftopt.sync.protocol.messages import IncarnationId

EVEN = 1.25
"""Shares are even unless that takes this many times as long as shares by speed: between equal machines, noise in the
measured speeds must not affect the assignment."""
WORTH_S = 0.05
"""Shares by speed must also save this many seconds: of units that take almost no time, only noise is measured."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which replica computes which units of the ``batch`` that makes ``version``.

    ``number``: unique in the job; a newer plan has a higher one. ``shares``: together, they are the batch.
    """

    number: int
    version: int
    batch: Ranges
    shares: Mapping[IncarnationId, Ranges]

    def share(self, incarnation_id: IncarnationId) -> Ranges:
        return self.shares.get(incarnation_id, ())

    def covers(self, parts: Mapping[IncarnationId, Ranges]) -> bool:
        """COVER: whether ``parts`` are shares of this plan, with each unit of the batch in one of them."""
        fits = all(self.share(incarnation_id) == units for incarnation_id, units in parts.items())
        return fits and sum(map(size, parts.values())) == size(self.batch) and union(*parts.values()) == self.batch

    def lost(self, present: Iterable[IncarnationId]) -> Ranges:
        return subtract(self.batch, union(*(self.share(incarnation_id) for incarnation_id in present)))

    def without(
        self,
        number: int,
        present: Iterable[IncarnationId],
        speeds: Mapping[IncarnationId, float],
        left: Mapping[IncarnationId, int],
    ) -> BatchPlan:
        """PLAN: the next plan of the same batch. Replicas in ``present`` keep their shares; the others' units go to the
        replicas in ``speeds`` (seconds per unit, 0 if unknown; not empty), which have ``left`` units to compute."""
        kept = {x: self.shares[x] for x in present if x in self.shares}
        lost = subtract(self.batch, union(*kept.values()))
        more = _runs(lost, _soonest(size(lost), _pace(speeds), left))
        shares = {x: union(kept.get(x, ()), more.get(x, ())) for x in sorted({*kept, *more})}
        return BatchPlan(number, self.version, self.batch, shares)


def first_plan(number: int, version: int, batch: Ranges, speeds: Mapping[IncarnationId, float]) -> BatchPlan:
    """The first plan of a batch; ``speeds``: as in `share_out`."""
    return BatchPlan(number, version, batch, share_out(batch, speeds, least=1))


def restart(version: int, batch: Ranges, claims: Mapping[IncarnationId, tuple[int, Ranges]]) -> BatchPlan:
    """RESTART: the shares left of earlier plans, to be completed by `BatchPlan.without`.

    ``claims``: the number of the last plan that each replica received, and its share.
    """
    kept: dict[IncarnationId, Ranges] = {}
    for incarnation_id, (_, units) in sorted(claims.items(), key=lambda x: (-x[1][0], x[0])):
        if units and contains(batch, units) and not intersect(units, union(*kept.values())):
            kept[incarnation_id] = units
    return BatchPlan(0, version, batch, kept)


def share_out(units: Ranges, speeds: Mapping[IncarnationId, float], *, least: int = 0) -> dict[IncarnationId, Ranges]:
    """Which replica computes which units so that all are done soonest; without replicas that get none.

    Shares are even (the first by id have one unit more) unless that would take `EVEN` times as long, and `WORTH_S`
    longer. Each share is a run of neighbours.

    Args:
        units: the units to be computed.
        speeds: seconds per unit; 0 if unknown: the mean of the others is assumed.
        least: units for each, if there are enough: the speed of a replica without units is not measured.
    """
    pace, count = _pace(speeds), size(units)
    each, more = divmod(count, len(pace))
    even = {incarnation_id: each + (place < more) for place, incarnation_id in enumerate(pace)}
    one = dict.fromkeys(pace, least if least * len(pace) <= count else 0)
    rest = _soonest(count - sum(one.values()), pace, one)
    soonest = {incarnation_id: one[incarnation_id] + rest[incarnation_id] for incarnation_id in pace}
    takes_s = _takes(soonest, pace)
    worth_it = _takes(even, pace) > max(EVEN * takes_s, takes_s + WORTH_S)
    return _runs(units, soonest if worth_it else even)


def _pace(speeds: Mapping[IncarnationId, float]) -> dict[IncarnationId, float]:
    """Seconds per unit, by id; for unknown speeds, the mean of the others."""
    known = [x for x in speeds.values() if x > 0]
    usual = sum(known) / len(known) if known else 1.0
    return {x: speed if speed > 0 else usual for x, speed in sorted(speeds.items())}


def _soonest(
    count: int, pace: Mapping[IncarnationId, float], left: Mapping[IncarnationId, int]
) -> dict[IncarnationId, int]:
    """How many units go to which replica: each goes to the one that would be done with it first, after the units that
    it has ``left``."""
    counts = dict.fromkeys(pace, 0)
    done = [((left.get(incarnation_id, 0) + 1) * unit_s, incarnation_id) for incarnation_id, unit_s in pace.items()]
    heapq.heapify(done)
    for _ in range(count):
        at, incarnation_id = done[0]
        counts[incarnation_id] += 1
        heapq.heapreplace(done, (at + pace[incarnation_id], incarnation_id))
    return counts


def _runs(units: Ranges, counts: Mapping[IncarnationId, int]) -> dict[IncarnationId, Ranges]:
    """The shares with these counts of units; each is a run of neighbours. Without replicas that get none."""
    shares: dict[IncarnationId, Ranges] = {}
    for incarnation_id, count in counts.items():
        if count:
            shares[incarnation_id] = first(units, count, parts=len(units))
            units = subtract(units, shares[incarnation_id])
    return shares


def _takes(counts: Mapping[IncarnationId, int], pace: Mapping[IncarnationId, float]) -> float:
    return max(count * pace[incarnation_id] for incarnation_id, count in counts.items())


@dataclass
class Portion:
    """One replica's part of the batch that makes ``version`` (0: none is known). Not thread-safe.

    ``units``: its share of the newest plan. ``kept``: units whose gradients are in the sum. ``dropped``: how often the
    sum was dropped (OWN, TIE); the holder of the sum empties it when this has changed.
    """

    version: int = 0
    plan: int = 0
    units: Ranges = ()
    kept: Ranges = field(default=(), init=False)
    dropped: int = field(default=0, init=False)

    def assign(self, version: int, plan: int, units: Ranges) -> None:
        """Takes the newest plan, or the same one again."""
        if version != self.version or not contains(units, self.kept):
            self.drop()
        self.version, self.plan, self.units = version, plan, units

    def next(self, count: int = 1) -> Ranges:
        """The next units to compute, ``count`` at most; none when the share is done."""
        left = subtract(self.units, self.kept)
        return first(left, count, parts=len(left))

    def add(self, version: int, units: Ranges) -> bool:
        """Adds units whose gradients are computed; returns whether all are still this replica's, and so in the sum."""
        mine = version == self.version and contains(subtract(self.units, self.kept), units)
        if mine:
            self.kept = union(self.kept, units)
        return mine

    @property
    def left(self) -> int:
        """The number of units not computed yet."""
        return size(self.units) - size(self.kept)

    def drop(self) -> None:
        self.dropped += bool(self.kept)
        self.kept = ()
