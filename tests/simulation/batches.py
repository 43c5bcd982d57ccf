"""A modelled training thread of a gradient method: ``ftopt.sync.replica.global_batch`` with a list for the sum.

It computes the units of its share one after the other, offers their sum, and computes inherited units while the batch
is undecided. The network thread brings plans at any moment; an offer reaches it a moment later.
"""

from __future__ import annotations

from ftopt.sync.protocol.intervals import Ranges, size, union
from ftopt.sync.protocol.ledger.plans import Portion
from ftopt.sync.protocol.messages import Contribution
from tests.simulation.saving import give
from tests.simulation.world import Process

AGAIN_S = 0.2
LOOK_S = 2.0
"""Seconds until it offers again what was not accepted, and until it looks again without having been woken."""


class Shares:
    """The training thread of one life of a process."""

    def __init__(self, process: Process) -> None:
        self.portion = Portion()
        self.ended = False
        self._process = process
        self._world = process.world
        self._sum: list[int] = []
        self._dropped = 0
        self._unit: tuple[int, Ranges] | None = None
        self._under_way = 0
        """Offers that the network thread has not seen yet."""
        self._tried: object = None
        self._idle = False
        self._turn = 0

    @property
    def state(self) -> str:
        return "waiting" if self._unit is None else "training"

    @property
    def stands_still(self) -> bool:
        """Whether it waits for the fate of a contribution."""
        return self._idle and self._outstanding and not self._process.machine.fragments[0].released

    def begin(self) -> None:
        self._process.later(0.0, self._work)

    def poke(self) -> None:
        if self._idle:
            self._idle = False
            self._process.later(0.0, self._work)

    def assign(self, version: int, plan: int, units: tuple[tuple[int, int], ...], *, ended: bool) -> None:
        """A plan. Network thread."""
        self.ended = ended
        if ended:
            return
        same, before, dropped = version == self.portion.version, self.portion.units, self.portion.dropped
        self.portion.assign(version, plan, units)
        if same and self.portion.dropped > dropped:
            self._world.coverage["a sum given up"] += 1
        elif same and units != before:
            self._world.coverage["a share that grows"] += 1

    def reset(self) -> None:
        """The incarnation is gone."""
        self.assign(0, 0, (), ended=False)

    # ------------------------------------------------------------ the training thread

    def _work(self) -> None:
        """Until it waits: the next unit, or the offer."""
        p, shard, portion = self._process, self._process.shards[0], self.portion
        if p.gone or p.hangs(self._work):
            return
        self._take_over()
        self._sync()
        if p.leaving and (not self._outstanding or p.machine.fragments[0].released):
            p.goodbye()
            return
        planned = portion.plan > 0 and shard.taken is not None and portion.version == shard.taken.version + 1
        units = portion.next(self._world.knobs.at_once) if planned and not p.leaving else ()
        if units:
            self._unit = (portion.version, units)
            p.later(p.step_s * size(units) * self._world.between(0.8, 1.2), self._add)
            return
        share = (portion.version, portion.plan, portion.units)
        again = share == self._tried
        if planned and not self._outstanding and not again:
            self._tried = share
            self._offer()
        self._turn += 1
        self._idle = not again or self._outstanding
        if self._idle:
            p.later(LOOK_S, self._look, self._turn)
        else:  # it was not accepted: a newer plan, or a state that is fetched
            p.later(AGAIN_S if planned else LOOK_S, self._forget)

    @property
    def _outstanding(self) -> bool:
        return self._under_way > 0 or self._process.machine.fragments[0].outstanding

    def _forget(self) -> None:
        self._tried = None
        self._work()

    def _look(self, turn: int) -> None:
        if self._idle and turn == self._turn:
            self._idle = False
            self._work()

    def _add(self) -> None:
        if self._process.hangs(self._add):
            return
        assert self._unit is not None
        (version, units), self._unit = self._unit, None
        mine = self.portion.add(version, units)
        self._sync()
        if mine:
            self._sum += (unit for start, stop in units for unit in range(start, stop))
        self._work()

    def _sync(self) -> None:
        if self._dropped != self.portion.dropped:
            self._dropped, self._sum = self.portion.dropped, []

    def _offer(self) -> None:
        """The sum is that of the share. With more units than before it is the same inner step."""
        p, shard = self._process, self._process.shards[0]
        if p.local_steps == shard.base_step:
            p.local_steps += 1
        finite = not self._world.chance(self._world.knobs.nonfinite)
        units = union((unit, unit + 1) for unit in self._sum)
        record = shard.applied
        if record is None:
            return
        contribution = Contribution(
            fragment=0,
            version=record.version,
            steps=p.local_steps - shard.base_step,
            last_step=p.local_steps,
            weight=float(sum(stop - start for start, stop in units)) if finite else 0.0,
            finite=finite,
            ranges=self.portion.units,
            plan=self.portion.plan,
        )
        shard.freeze(p.incarnation_id, contribution, units)
        self._under_way += 1
        p.later(self._world.delay() * self._world.random.choice((0.0, 0.1, 1.0)), self._hand_in, contribution)

    def _hand_in(self, contribution: Contribution) -> None:
        """It reaches the network thread."""
        self._under_way -= 1
        if self._world.strike():
            self._process.misfortune()
            if not self._process.alive:
                return
        self._process.act(self._process.machine.propose(contribution))

    def _take_over(self) -> None:
        """The step is taken; a share that came too late for its batch is given up (TIE)."""
        p, shard = self._process, self._process.shards[0]
        before = shard.taken
        if shard.record is before:
            return
        p.take_over(0)
        if before is None or shard.record is None or before.version == shard.record.version:
            return
        self._sum = []
        if p.local_steps > shard.base_step:
            self._world.coverage["a share too late for its batch"] += 1
            self._world.discard(p.incarnation_id, 0, shard.base_step, p.local_steps)
            shard.give_up(p.local_steps)
        give(p)
