"""The lease of an incarnation, as its machine knows it: units that are granted, and not in the committed state."""

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
    """The lease of one replica's machine; always empty in a job without a ledger.

    Args:
        wants: number of units to hold after each commit; 0: none.
        held: all units that are granted and not done (TOTAL): queued, or used by steps that are not counted.
        cursor: the highest that a grant has named; the next incarnation keeps it (CURSOR).
        asked: whether a request is not answered yet.
        plan: the newest plan, in a job with a global batch, in place of a lease.
    """

    wants: int = 0
    held: Ranges = ()
    cursor: int = 0
    asked: bool = False
    plan: m.Plan = NO_PLAN

    def granted(self, grant: m.Grant) -> list[ReplicaEffect]:
        """Adds granted units, or takes the answer that there are none."""
        self.cursor = max(self.cursor, grant.cursor)
        if grant.ranges or grant.out_of_units:
            self.asked = False
        self.held = union(self.held, grant.ranges)
        return [grant]

    def settle(
        self, record: m.Record, offered: m.Contribution | None = None, *, counted: int = 0
    ) -> list[ReplicaEffect]:
        """Settles the lease with the new committed ``record``; the ``offered`` units are in it if their last step is
        ``counted``."""
        if record.fragment or not (record.done or self.held):
            return []
        self.held = subtract(self.held, record.done)
        own = offered.ranges if offered is not None and offered.last_step <= counted else ()
        return [Settled(record.done, own)]

    def ask(self) -> list[ReplicaEffect]:
        """Asks for units, which run short: as many as it wants to hold, or as it has used without being counted if that
        is more.

        So a replica that trains on without being counted asks seldom, and holds few ranges.
        """
        if self.asked or not self.wants:
            return []
        self.asked = True
        return [Send(m.Ask(min(max(self.wants, size(self.held)), MAX_WANTS)))]

    def may_offer(self, c: m.Contribution, samples: Samples | None) -> bool:
        """Whether the units that ``c`` has used are held: not another incarnation's, nor a counted step's.

        COVER: with a global batch, whether they are the share of the newest plan.
        """
        if c.fragment or samples is None or samples.global_batch is None:
            return contains(self.held, c.ranges)
        return (c.version + 1, c.plan, c.ranges) == (self.plan.version, self.plan.plan, self.plan.units)

    def take_plan(self, plan: m.Plan, f: FragmentState) -> list[ReplicaEffect]:
        """Takes a plan (PLAN). A contribution under an older plan fits the new one, too, or is freed: its sum is then
        extended, or dropped (OWN).

        FREEZE's one exception: no plan is issued while an attempt is undecided, so the attempt was aborted.
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
        """Drops all units, since the incarnation is gone."""
        self.held, self.plan = (), NO_PLAN
