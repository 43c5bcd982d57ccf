"""The global batch under way, coordinator side: its newest plan, and who was told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.attempts import AttemptNumbers
from ftopt.sync.protocol.coordinator.effects import CoordinatorEffect, Emit, SendTo
from ftopt.sync.protocol.coordinator.roster import Member
from ftopt.sync.protocol.intervals import Ranges, end, size
from ftopt.sync.protocol.ledger.plans import BatchPlan, first_plan, restart
from ftopt.sync.protocol.samples import Samples


class BatchShares:
    """Shares out batch after batch (BATCH, PLAN).

    Args:
        samples: the job's.
        numbers: what plans are numbered with.
    """

    def __init__(self, samples: Samples, numbers: AttemptNumbers) -> None:
        self.samples = samples
        self.plan: BatchPlan | None = None
        self._numbers = numbers
        self._told: dict[str, int | None] = {}
        self._batch: Ranges = ()

    def open(self, version: int, done: Ranges, claims: Mapping[m.IncarnationId, tuple[int, Ranges]]) -> None:
        """RESTART: a coordinator begins, or begins anew after a rollback.

        BATCH: the version is the cursor, if the initial source's state had no units in it: the batches follow what is
        ``done``.

        Args:
            version: what the batch makes.
            done: units in the committed state.
            claims: see `restart`.
        """
        self._told.clear()
        self._batch = self.samples.batch_from(end(done))
        self.plan = restart(version, self._batch, claims) if claims else None

    def forget(self, replica: str) -> None:
        """It is away, or fetches: when it is back it is told anew."""
        self._told.pop(replica, None)

    def renew(self, version: int, present: Sequence[Member], able: Sequence[Member]) -> list[CoordinatorEffect]:
        """PLAN: the first plan of a batch, or the next one if somebody is not ``present`` that has a share.

        Args:
            version: what the batch makes.
            present: who keeps its share.
            able: who may be given more.

        Returns:
            An event if there is a new plan.
        """
        plan, speeds, batch = self.plan, {x.incarnation_id: x.step_s for x in able}, self._batch
        if not speeds or not batch:
            return []
        if plan is None or plan.version != version:
            self.plan = first_plan(self._numbers.next(), version, batch, speeds)
        elif not plan.number or plan.lost(x.incarnation_id for x in present):
            self.plan = plan.without(self._numbers.next(), [x.incarnation_id for x in present], speeds)
        else:
            return []
        self._told.clear()
        shares = {incarnation_id[0]: share for incarnation_id, share in self.plan.shares.items()}
        return [Emit("plan", fragment=0, version=version, data={"plan": self.plan.number, "shares": shares})]

    def tell(self, version: int, holders: Sequence[Member]) -> list[CoordinatorEffect]:
        """The newest plan, to whoever holds the version that it builds on and has not been told."""
        plan = self.plan if self.plan is not None and self.plan.version == version else None
        ended = not self._batch
        if plan is None and not ended:
            return []
        effects: list[CoordinatorEffect] = []
        for x in holders:
            if x.conn is None or self._told.get(x.replica) == x.conn:
                continue
            self._told[x.replica] = x.conn
            share = plan.share(x.incarnation_id) if plan is not None else ()
            x.load = max(1, size(share))
            effects.append(SendTo(x.conn, m.Plan(version, plan.number if plan is not None else 0, share, ended)))
        return effects

    def fits(self, incarnation_id: m.IncarnationId, contribution: m.Contribution) -> bool:
        """COVER: whether it is this member's share of the newest plan."""
        plan = self.plan
        return plan is not None and (contribution.plan, contribution.ranges) == (
            plan.number,
            plan.share(incarnation_id),
        )

    def covers(self, members: Sequence[Member], proposals: Mapping[str, m.Contribution]) -> bool:
        """COVER: whether the members' contributions are the batch."""
        parts = {x.incarnation_id: proposals[x.replica].ranges for x in members}
        return self.plan is not None and self.plan.covers(parts)

    def missing(self, proposals: Mapping[str, m.Contribution]) -> list[str]:
        """Who has a share and has not proposed it."""
        return (
            [incarnation_id[0] for incarnation_id in self.plan.shares if incarnation_id[0] not in proposals]
            if self.plan is not None
            else []
        )

    def commit(self) -> tuple[list[CoordinatorEffect], Ranges]:
        """The batch is whole: events, and all units that are done by now."""
        self._told.clear()
        batch, per_epoch = self._batch, self.samples.units_per_epoch
        start, stop = batch[0]
        self._batch = self.samples.batch_from(stop)
        effects: list[CoordinatorEffect] = [
            Emit("epoch_done", data={"epoch": epoch}) for epoch in range(start // per_epoch, stop // per_epoch)
        ]
        if stop == self.samples.units:
            effects.append(Emit("data_ended", data={"units": stop}))
        return effects, ((0, stop),)
