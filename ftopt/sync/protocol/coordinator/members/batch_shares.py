"""The global batch under way, coordinator side: its newest plan, and which replicas have received it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects, Emit
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, send
from ftopt.sync.protocol.coordinator.rounds.assignment import Assignment, Claims, CountedUnits, count_units
from ftopt.sync.protocol.coordinator.rounds.attempts import Attempt, AttemptNumbers
from ftopt.sync.protocol.intervals import Ranges, end, size
from ftopt.sync.protocol.ledger.plans import BatchPlan, first_plan, restart
from ftopt.sync.protocol.samples import Samples


class BatchShares(Assignment):
    """Shares out batch after batch (BATCH, PLAN).

    ``recheck_s``: seconds after which a member that is unreachable or busy may be able to take part again.
    """

    whole_batch = True

    def __init__(self, samples: Samples, roster: Roster, numbers: AttemptNumbers, *, recheck_s: float) -> None:
        self.samples: Samples = samples
        self.recheck_s = recheck_s
        self.plan: BatchPlan | None = None
        self._roster = roster
        self._numbers = numbers
        self._notified: dict[str, int | None] = {}
        """Replica -> the connection on which it has received the newest plan."""
        self._batch: Ranges = ()
        self._first = False
        """Whether the plan is the first one of the job, or of its start anew."""

    def open(self, claims: Claims, at: m.Position, done: Ranges) -> Effects:
        """RESTART: takes over the shares of earlier plans that replicas report. BATCH: the batches follow ``done``."""
        self._notified.clear()
        self._batch = self.samples.batch_from(end(done))
        self.plan = restart(at.version + 1, self._batch, claims.shares) if claims.shares else None
        return []

    def forget(self, replica: str) -> None:
        """Makes a replica receive the plan again when it is back."""
        self._notified.pop(replica, None)

    def expects(self, member: Member) -> bool:
        """Whether a member has a share of the job's first batch before it holds the job's state: all replicas of a job
        that begins join at once, and one hears of it before the others."""
        return self.plan is None or (self._first and member.incarnation_id in self.plan.shares)

    def assign(
        self, at: m.Position, proposals: dict[str, m.Contribution], able: Callable[[], list[Member]]
    ) -> tuple[bool, Effects]:
        """PLAN: see `Assignment.assign`; each member that holds ``at`` is sent its share of the newest plan once."""
        renewed = self._renew(at, proposals, able())
        return bool(renewed), renewed + self._notify(at)

    def _renew(self, at: m.Position, proposals: dict[str, m.Contribution], here: list[Member]) -> Effects:
        """Makes the first plan of a batch, or the next one if a member cannot hand in its share."""
        plan, version = self.plan, at.version + 1
        present = [x.incarnation_id for x in here if not x.leaving or x.replica in proposals]
        holders = {x.incarnation_id: x.step_s for x in here if not x.leaving and x.held.get(at.fragment) == at}
        if not holders or not self._batch:
            return []
        if plan is None or plan.version != version:
            self._first = plan is None
            speeds = {x.incarnation_id: x.step_s for x in here if not x.leaving}
            self.plan = first_plan(self._numbers.next(), version, self._batch, speeds)
            if not self.plan.shares.keys() & holders:  # the batch has fewer units than replicas; a fetch may never end
                self.plan = replace(self.plan, shares=first_plan(0, version, self._batch, holders).shares)
        elif not plan.number or plan.lost(present):
            left = {x.incarnation_id: self._left(plan, x, proposals) for x in here}
            self.plan = plan.without(self._numbers.next(), present, holders, left)
        else:
            return []
        self._notified.clear()
        self._renumber(self.plan, at, proposals)
        shares = {replica: share for (replica, _), share in self.plan.shares.items()}
        return [Emit("plan", fragment=0, version=version, data={"plan": self.plan.number, "shares": shares})]

    def _left(self, plan: BatchPlan, member: Member, proposals: Mapping[str, m.Contribution]) -> int:
        """Number of units of its share that a member has not computed, as far as is known."""
        if member.replica in proposals:
            return 0
        number, left = member.left
        return left if number == plan.number > 0 else size(plan.share(member.incarnation_id))

    def _renumber(self, plan: BatchPlan, at: m.Position, proposals: dict[str, m.Contribution]) -> None:
        """Moves proposals of holders with unchanged shares to the new plan, and drops the others."""
        shares = {x.replica: plan.share(x.incarnation_id) for x in self._holders(at)}
        for replica, contribution in list(proposals.items()):
            if shares.get(replica) == contribution.ranges:
                proposals[replica] = replace(contribution, plan=plan.number)
            else:
                del proposals[replica]

    def _notify(self, at: m.Position) -> Effects:
        version, ended = at.version + 1, not self._batch
        plan = self.plan if self.plan is not None and self.plan.version == version else None
        if plan is None and not ended:
            return []
        effects: Effects = []
        for x in (x for x in self._holders(at) if self._notified.get(x.replica) != x.conn):
            self._notified[x.replica] = x.conn
            share = plan.share(x.incarnation_id) if plan is not None else ()
            x.load = max(1, size(share))
            effects += send([x], m.Plan(version, plan.number if plan is not None else 0, share, ended))
        return effects

    def _holders(self, at: m.Position) -> list[Member]:
        return [x for x in self._roster.connected() if x.held.get(at.fragment) == at]

    def fits(self, incarnation_id: m.IncarnationId, contribution: m.Contribution) -> bool:
        """COVER: whether a proposal is its member's share of the newest plan."""
        plan, c = self.plan, contribution
        return plan is not None and (c.plan, c.ranges) == (plan.number, plan.share(incarnation_id))

    def covers(self, contributions: Mapping[m.IncarnationId, m.Contribution]) -> bool:
        """COVER: whether contributions are the whole batch."""
        return self.plan is not None and self.plan.covers({x: c.ranges for x, c in contributions.items()})

    def missing(self, proposals: Mapping[str, m.Contribution]) -> list[str]:
        """Replicas that have not proposed their shares."""
        shares = self.plan.shares if self.plan is not None else ()
        return [replica for replica, _ in shares if replica not in proposals]

    def begin(self, attempt: Attempt) -> None:
        if self.plan is not None:
            attempt.ranges, attempt.plan = self.plan.batch, self.plan.number

    def commit(self, attempt: Attempt) -> CountedUnits:
        self._notified.clear()
        self._first = False
        start, stop = self._batch[0]
        self._batch = self.samples.batch_from(stop)
        return count_units(self.samples, attempt, start, ((0, stop),))
