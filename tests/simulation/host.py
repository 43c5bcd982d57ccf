"""A modelled optimizer: the bookkeeping of ``ftopt.optimizer`` without the tensors.

A committed state is modelled by what it consists of: for each incarnation the last inner step that is in it. Adding a
contribution that does not begin where the state's steps of that incarnation end makes a *flaw*: steps twice or missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftopt.sync.protocol.intervals import Ranges, intersect, union
from ftopt.sync.protocol.messages import Contribution, IncarnationId, Record

StepSpan = tuple[IncarnationId, int, int]
"""Inner steps ``start + 1 .. stop`` of an incarnation."""


@dataclass(frozen=True, slots=True)
class Content:
    """A committed state of one fragment: bit-equal states have equal digests.

    ``steps``: the last inner step included of each incarnation (never dropped, unlike COUNT). ``flaw``: what I2 says
    against it, "" when nothing. ``gaps``: steps (incarnation, first, last) that it skips, since their
    replica had given them up. ``units``: of the sample ledger, in it; ``twice``: those that came in although they were.
    """

    digest: str
    steps: Mapping[IncarnationId, int] = field(default_factory=dict)
    flaw: str = ""
    gaps: tuple[tuple[IncarnationId, int, int], ...] = ()
    units: Ranges = ()
    twice: Ranges = ()


@dataclass(frozen=True, slots=True)
class Payload:
    """What a member sends: its inner steps ``start + 1 .. contribution.last_step``, which have used ``units``.

    ``inherited``: steps of others that are in it, since these have not come back (ADOPT).
    """

    incarnation_id: IncarnationId
    start: int
    contribution: Contribution
    units: Ranges
    inherited: tuple[StepSpan, ...] = ()


def reduce(anchor: Content, payloads: Iterable[Payload], *, taint: str = "") -> Content:
    """The result of an attempt from ``anchor``; ``taint`` models a flipped bit."""
    steps, flaw, text = dict(anchor.steps), "", [anchor.digest, taint]
    gaps: list[tuple[IncarnationId, int, int]] = []
    units, twice = anchor.units, list[Ranges]()
    for p in payloads:
        if p.contribution.excess > 1 and p.contribution.steps:
            flaw = f"a contribution of {p.incarnation_id[0]}#{p.incarnation_id[1]} is in it that is out of line"
        if p.units:
            twice.append(intersect(p.units, units))
            units = union(units, p.units)
        for whose, start, stop in ((p.incarnation_id, p.start, p.contribution.last_step), *p.inherited):
            counted = steps.get(whose)
            if counted is not None and counted > start:
                flaw = f"inner steps {start + 1}..{counted} of {whose[0]}#{whose[1]} are counted twice"
            elif counted is not None and counted < start:
                gaps.append((whose, counted + 1, start))
            steps[whose] = stop
            text.append(f"{whose} {start} {stop}")
    digest = hashlib.sha256("|".join(text).encode()).hexdigest()[:16]
    return Content(digest, steps, flaw, tuple(gaps), units, union(*twice))


@dataclass(frozen=True, slots=True)
class Kept:
    """One fragment as the training thread stands on it, for a checkpoint; see `Shard`."""

    record: Record
    content: Content
    base_step: int = 0
    marked_step: int = 0
    snapshot: Payload | None = None
    inherited: tuple[StepSpan, ...] = ()

    def standing(self, incarnation_id: IncarnationId, newest: Kept) -> tuple[int, tuple[StepSpan, ...]]:
        """The last step of ``incarnation_id`` that ``newest`` counts, and what of others' is still pending beside
        that."""
        frozen = self.snapshot
        if frozen is None or newest.record.counted_step(*incarnation_id) < frozen.contribution.last_step:
            return self.base_step, self.inherited
        return frozen.contribution.last_step, tuple(x for x in self.inherited if x not in frozen.inherited)


@dataclass(frozen=True, slots=True)
class SimCopy:
    """What a replica was when its round began. ``pending``: of each fragment, in spans of whose steps."""

    incarnation_id: IncarnationId
    pending: tuple[tuple[StepSpan, ...], ...]
    used: Ranges
    queue: Ranges


@dataclass(slots=True)
class Shard:
    """One fragment's variables in a modelled optimizer; the names are those of ``ftopt.step.outer.fragment``."""

    content: Content
    record: Record | None = None
    taken: Record | None = None
    base_step: int = 0
    marked_step: int = 0
    snapshot: Payload | None = None
    results: tuple[int, Content] | None = None
    reset: bool = False
    inherited: tuple[StepSpan, ...] = ()
    """Pending steps of others; they go out with the next contribution."""
    attempt: tuple[int, tuple[IncarnationId, ...]] | None = None
    """That is reduced, and its members."""
    made: tuple[int, tuple[IncarnationId, ...]] | None = None
    """The attempt that has made the record, if it was reduced here."""
    spoiled: bool = False
    """The pending steps are out of line."""
    excluded: int = 0
    """Rounds in a row that were decided without them."""
    counted: bool = False
    """The newer state that waits has the last contribution."""
    before: Kept | None = None
    """What is taken, while a newer state waits."""

    def advance(self, record: Record, content: Content, counted_step: int) -> None:
        """A newer committed state, which decides the snapshot's fate."""
        if self.record is self.taken is not None:
            self.before = self.kept()
        snapshot, self.snapshot, self.results, self.made = self.snapshot, None, None, None
        if snapshot is not None and snapshot.contribution.last_step <= counted_step:
            self.base_step, self.counted = snapshot.contribution.last_step, True
            if snapshot.contribution.steps:
                self.excluded = 0
            self.inherited = tuple(x for x in self.inherited if x not in snapshot.inherited)
        self.record, self.content = record, content

    def freeze(self, incarnation_id: IncarnationId, contribution: Contribution, units: Ranges) -> None:
        """A contribution that has used ``units`` is on its way."""
        self.snapshot = Payload(incarnation_id, self.base_step, contribution, units, self.inherited)

    @property
    def applied(self) -> Record | None:
        """The newest committed state; None when it waits to be taken up."""
        return self.record if self.record is self.taken else None

    def take_over(self, local_steps: int) -> bool:
        """Step 6, at a boundary. Returns whether pending steps were dropped (of a replica that was reset)."""
        if self.record is self.taken:
            return False
        self.taken, self.marked_step, self.before, self.counted = self.record, local_steps, None, False
        dropped, self.reset = self.reset, False
        if dropped:
            self.give_up(local_steps)
        return dropped

    def give_up(self, local_steps: int) -> None:
        """All that is pending is void."""
        self.base_step, self.inherited, self.spoiled, self.excluded = local_steps, (), False, 0

    def kept(self) -> Kept:
        """For a checkpoint: as the training thread stands on it."""
        if self.before is not None:
            return self.before
        assert self.record is not None
        return Kept(self.record, self.content, self.base_step, self.marked_step, self.snapshot, self.inherited)

    def put(self, kept: Kept) -> None:
        """Goes on with what a checkpoint has kept."""
        self.record = self.taken = kept.record
        self.content, self.base_step, self.marked_step = kept.content, kept.base_step, kept.marked_step
        self.snapshot, self.inherited, self.before, self.made = kept.snapshot, kept.inherited, None, None
        self.reset = False
