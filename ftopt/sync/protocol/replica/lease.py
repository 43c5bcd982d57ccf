"""What an incarnation holds of the sample ledger, as its machine knows it: granted, and not in the committed state."""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges, contains, size, subtract, union
from ftopt.sync.protocol.limits import MAX_WANTS
from ftopt.sync.protocol.replica.effects import ReplicaEffect, Send, Settled
from ftopt.sync.protocol.replica.fragment import FragmentState
from ftopt.sync.protocol.samples import Samples

NO_PLAN = m.Plan(0, 0, ())


@dataclass
class Lease:
    """The lease of one replica's machine; empty for ever in a job without a ledger.

    Args:
        wants: units to hold after each commit; 0: none.
        held: all that was granted and is not done (TOTAL): queued, or used by steps that are not counted.
        cursor: the highest that a grant has named; a next incarnation keeps it (CURSOR).
        asked: a question is not answered yet.
        plan: of the global batch, the newest; in a job with one, in place of a lease.
    """

    wants: int = 0
    held: Ranges = ()
    cursor: int = 0
    asked: bool = False
    plan: m.Plan = NO_PLAN

    def granted(self, grant: m.Grant) -> list[ReplicaEffect]:
        """More units, or the answer that there are none."""
        self.cursor = max(self.cursor, grant.cursor)
        if grant.ranges or grant.out_of_units:
            self.asked = False
        self.held = union(self.held, grant.ranges)
        return [grant]

    def settle(
        self, record: m.Record, offered: m.Contribution | None = None, *, counted: int = 0
    ) -> list[ReplicaEffect]:
        """``record`` is the committed state now; what was ``offered`` is in it if its last step is ``counted``."""
        if record.fragment or not (record.done or self.held):
            return []
        self.held = subtract(self.held, record.done)
        own = offered.ranges if offered is not None and offered.last_step <= counted else ()
        return [Settled(record.done, own)]

    def ask(self) -> list[ReplicaEffect]:
        """Units run short: as many more as it wants to hold, and as many as it has used in vain so far.

        A replica that trains on without being counted thus asks seldom, and holds few ranges.
        """
        if self.asked or not self.wants:
            return []
        self.asked = True
        return [Send(m.Ask(min(max(self.wants, size(self.held)), MAX_WANTS)))]

    def may_offer(self, c: m.Contribution, samples: Samples | None) -> bool:
        """Whether the units that ``c`` has used are held: no other incarnation's, no counted step's.

        COVER: of a global batch they are the newest plan's share.
        """
        if c.fragment or samples is None or samples.global_batch is None:
            return contains(self.held, c.ranges)
        return (c.version + 1, c.plan, c.ranges) == (self.plan.version, self.plan.plan, self.plan.units)

    def take_plan(self, plan: m.Plan, f: FragmentState) -> list[ReplicaEffect]:
        """PLAN. What is outstanding under an older plan fits the new one too, or is free: extended, or dropped (OWN).

        FREEZE's one exception: none is issued while an attempt is undecided, so that was aborted.
        """
        if f.record is None or plan.version != f.record.version + 1:  # TIE
            return []
        self.plan = plan
        c = f.contribution
        if c is None or c.plan == plan.plan:
            return [plan]
        effects = f.stop()
        if c.ranges == plan.units:
            f.renumber(plan.plan)
        else:
            f.free()
        return [*effects, plan]

    def share(self, record: m.Record | None) -> m.Plan:
        """The newest plan if it is for the version after ``record``."""
        return self.plan if record is not None and self.plan.version == record.version + 1 else NO_PLAN

    def reset(self) -> None:
        """The incarnation is gone, and all that it held."""
        self.held, self.plan = (), NO_PLAN
