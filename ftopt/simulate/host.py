"""A modelled optimizer: the bookkeeping of ``ftopt.optimizer`` without the tensors.

A committed state is modelled by what it consists of: for each incarnation the last inner step that is in it. Adding a
contribution that does not begin where the state's steps of that incarnation end makes a *flaw*: steps twice or missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftopt.sync.protocol.intervals import Ranges, intersect, union
from ftopt.sync.protocol.messages import Contribution, Mark, Record


@dataclass(frozen=True, slots=True)
class Content:
    """A committed state of one fragment: bit-equal states have equal digests.

    ``steps``: the last inner step included of each incarnation (never dropped, unlike COUNT). ``flaw``: what I2 says
    against it, "" when nothing. ``gaps``: steps (mark, first, last) that it skips, since their
    replica had given them up. ``units``: of the sample ledger, in it; ``twice``: those that came in although they were.
    """

    digest: str
    steps: Mapping[Mark, int] = field(default_factory=dict)
    flaw: str = ""
    gaps: tuple[tuple[Mark, int, int], ...] = ()
    units: Ranges = ()
    twice: Ranges = ()


@dataclass(frozen=True, slots=True)
class Payload:
    """What a member sends: its inner steps ``start + 1 .. contribution.last_step``, which have used ``units``."""

    mark: Mark
    start: int
    contribution: Contribution
    units: Ranges


def reduce(anchor: Content, payloads: Iterable[Payload], *, taint: str = "") -> Content:
    """The result of an attempt from ``anchor``; ``taint`` models a flipped bit."""
    steps, flaw, text = dict(anchor.steps), "", [anchor.digest, taint]
    gaps: list[tuple[Mark, int, int]] = []
    units, twice = anchor.units, list[Ranges]()
    for p in payloads:
        if p.units:
            twice.append(intersect(p.units, units))
            units = union(units, p.units)
        stop, counted = p.contribution.last_step, steps.get(p.mark)
        if counted is not None and counted > p.start:
            flaw = f"inner steps {p.start + 1}..{counted} of {p.mark[0]}#{p.mark[1]} are counted twice"
        elif counted is not None and counted < p.start:
            gaps.append((p.mark, counted + 1, p.start))
        steps[p.mark] = stop
        text.append(f"{p.mark} {p.start} {stop}")
    digest = hashlib.sha256("|".join(text).encode()).hexdigest()[:16]
    return Content(digest, steps, flaw, tuple(gaps), units, union(*twice))


@dataclass(slots=True)
class Shard:
    """One fragment's variables in a modelled optimizer; the names are those of ``ftopt.optimizer.state``."""

    content: Content
    record: Record | None = None
    taken: Record | None = None
    base_step: int = 0
    marked_step: int = 0
    snapshot: Payload | None = None
    results: tuple[int, Content] | None = None
    reborn: bool = False

    def advance(self, record: Record, content: Content, counted_step: int) -> None:
        """A newer committed state; the snapshot has learnt its fate."""
        snapshot, self.snapshot, self.results = self.snapshot, None, None
        if snapshot is not None and snapshot.contribution.last_step <= counted_step:
            self.base_step = snapshot.contribution.last_step
        self.record, self.content = record, content

    def propose(
        self,
        mark: Mark,
        local_steps: int,
        *,
        finite: bool,
        ranges: Ranges = (),
        overlap_s: float = 0.0,
        grace: float = 0.0,
    ) -> Contribution | None:
        """Freezes a contribution; None when a newer state waits to be taken up."""
        if self.record is None or self.record is not self.taken:
            return None
        steps = local_steps - self.base_step
        contribution = Contribution(
            fragment=self.record.fragment,
            version=self.record.version,
            steps=steps,
            last_step=local_steps,
            weight=float(steps) if finite else 0.0,
            finite=finite,
            ranges=ranges,
            overlap_s=overlap_s,
            grace=grace,
        )
        if not finite:
            self.base_step = local_steps
        self.snapshot = Payload(mark, self.base_step, contribution, ranges)
        self.marked_step = local_steps
        return contribution

    def hand_in(
        self, mark: Mark, local_steps: int, *, plan: int, share: Ranges, units: Ranges, finite: bool
    ) -> Contribution | None:
        """Freezes the sum over ``units`` as a share of a global batch; None when a newer state waits to be taken up."""
        if self.record is None or self.record is not self.taken:
            return None
        weight = float(sum(stop - start for start, stop in units)) if finite else 0.0
        steps = local_steps - self.base_step
        contribution = Contribution(
            0, self.record.version, steps, local_steps, weight, finite=finite, ranges=share, plan=plan
        )
        self.snapshot = Payload(mark, self.base_step, contribution, units)
        return contribution

    def take_over(self, local_steps: int) -> bool:
        """Step 6, at a boundary. Returns whether pending steps were dropped (a reborn replica's)."""
        if self.record is self.taken:
            return False
        self.taken, self.marked_step = self.record, local_steps
        dropped, self.reborn = self.reborn, False
        if dropped:
            self.base_step = local_steps
        return dropped
