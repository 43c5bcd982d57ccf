"""A modelled training thread: inner steps, and at their boundaries what ``ftopt.step.outer.step`` does."""

from __future__ import annotations

import math

from ftopt.sync.protocol.messages import Contribution
from tests.simulation.backups import SimBackup
from tests.simulation.loader import Loader
from tests.simulation.saving import give
from tests.simulation.world import Process

_EXCLUDED = 2
"""After so many rounds in a row without them, steps that are out of line are given up."""


class InnerSteps:
    """The training thread of one life of a process; its method takes inner steps between outer steps."""

    def __init__(self, process: Process, backup: SimBackup) -> None:
        self.waits: int | None = None
        """The fragment whose contribution it waits for."""
        self._process = process
        self._backup = backup
        self._world = process.world
        self._offered: dict[int, int] = {}  # by one that leaves: fragment -> version that it was offered for
        self._spent_s = -math.inf

    @property
    def state(self) -> str:
        """The state that heartbeats report."""
        if self.waits is not None:
            return "waiting"
        loader = self._process.loader
        return "out_of_units" if loader is not None and loader.waits else "training"

    @property
    def stands_still(self) -> bool:
        """Whether it waits for the fate of a contribution."""
        return self.waits is not None

    def begin(self) -> None:
        """There is a state to train on."""
        self._process.later(self._process.step_s, self._step)

    def poke(self) -> None:
        """Something may have changed."""
        if self.waits is not None and not self._waiting(self.waits):
            self.waits = None
            self._process.later(0.0, self._boundary)

    def _step(self) -> None:
        p = self._process
        if p.gone or p.hangs(self._step):
            return
        if p.loader is not None and not p.loader.draw(p.local_steps + 1):
            self._idle(p.loader)
            return
        p.local_steps += 1
        self._boundary()

    def _idle(self, loader: Loader) -> None:
        """What `Units.take` does while there are no units; at the end of the data the rest is offered."""
        p = self._process
        for fragment, (shard, state) in enumerate(zip(p.shards, p.machine.fragments, strict=True)):
            self._take_over(fragment)
            pending = p.local_steps > shard.base_step
            if not fragment and loader.unit_queue.offer() and self._world.now >= self._spent_s + 2.0:
                pending, self._spent_s = True, self._world.now
            if loader.waits and not state.outstanding and (pending or state.called_in):
                self._propose(fragment, now=False)
        if not p.alive:
            return
        if p.leaving and not any(self._waiting(f) for f in range(len(p.shards))):
            p.goodbye()
        else:
            p.later(self._world.between(0.1, 0.3), self._step)

    def _boundary(self) -> None:
        """What `OuterStep.boundary` does; then the next step, unless it waits."""
        p = self._process
        if p.gone or p.hangs(self._boundary):
            return
        for fragment, (shard, state) in enumerate(zip(p.shards, p.machine.fragments, strict=True)):
            self._take_over(fragment)
            due = p.local_steps - shard.marked_step >= self._world.knobs.sync_every
            now = self._world.knobs.hasty > 0 and self._world.chance(self._world.knobs.hasty)
            if (due or now or self._has_rest(fragment) or state.called_in) and not state.outstanding:
                if p.leaving and shard.applied is not None:
                    self._offered[fragment] = shard.applied.version
                self._propose(fragment, now=now)
            if (due or now or p.leaving) and self._waiting(fragment):
                self.waits = fragment
                return
            self._take_over(fragment)
        self._backup.between()
        if p.leaving and not any(self._has_rest(f) for f in range(len(p.shards))):
            p.goodbye()
        else:
            p.later(p.step_s * self._world.between(0.8, 1.2), self._step)

    def _has_rest(self, fragment: int) -> bool:
        """Whether it leaves with steps that it has not offered to the round that is gathering."""
        p, shard = self._process, self._process.shards[fragment]
        if not p.leaving or shard.applied is None or p.local_steps <= shard.base_step:
            return False
        return self._offered.get(fragment) != shard.applied.version

    def _waiting(self, fragment: int) -> bool:
        f = self._process.machine.fragments[fragment]
        return f.outstanding and not f.released

    def _take_over(self, fragment: int) -> None:
        p, shard = self._process, self._process.shards[fragment]
        begins = shard.counted
        if shard.excluded >= _EXCLUDED and not p.machine.fragments[fragment].outstanding:
            self._give_up(fragment)
        if p.take_over(fragment) and p.loader is not None and not fragment:
            p.loader.unit_queue.redo()
        if not fragment:
            give(p)
        if begins and not shard.counted:
            self._backup.begin()

    def _give_up(self, fragment: int) -> None:
        """Pending steps that were out of line twice are dropped; others may use their units."""
        p, shard = self._process, self._process.shards[fragment]
        self._world.discard(p.incarnation_id, fragment, shard.base_step, p.local_steps)
        shard.give_up(p.local_steps)
        self._world.coverage["an outlier gives its steps up"] += 1
        if p.loader is not None and not fragment:
            p.loader.unit_queue.redo()

    def _size_of_spoiled(self) -> float:
        """Of each replica another: two bits do not flip alike."""
        return 1e9 * 1e6 ** sorted(self._world.processes).index(self._process.name)

    def _propose(self, fragment: int, *, now: bool) -> None:
        p, knobs = self._process, self._world.knobs
        shard, before = p.shards[fragment], p.shards[fragment].base_step
        if fragment in p.installing:
            return
        finite = not self._world.chance(knobs.nonfinite)
        ranges = p.loader.unit_queue.offer() if p.loader is not None and not fragment else ()
        record, steps = shard.applied, p.local_steps - before
        if record is None:
            return
        if knobs.outliers and steps and finite:
            shard.spoiled = shard.spoiled or self._world.chance(knobs.outliers)
        contribution = Contribution(
            fragment=fragment,
            version=record.version,
            steps=steps,
            last_step=p.local_steps,
            weight=float(steps) if finite else 0.0,
            finite=finite,
            norm=self._size_of_spoiled() if shard.spoiled and finite else 1.0,
            excess=1e9 if shard.spoiled and finite else 1.0,
            alone=1e9 if shard.spoiled and finite else 1.0,
            ranges=ranges,
            overlap_s=knobs.overlap_steps * p.step_s,
            grace=knobs.grace,
        )
        if not finite:
            shard.give_up(p.local_steps)
            self._world.discard(p.incarnation_id, fragment, before, p.local_steps)
        shard.freeze(p.incarnation_id, contribution, ranges)
        shard.marked_step = p.local_steps
        if self._world.strike():
            p.misfortune()
            if not p.alive:
                return
        effects = p.machine.propose(contribution, now=now)
        if p.loader is not None and p.machine.fragments[0].contribution is contribution:
            p.check_offered(before, contribution)
        p.act(effects)
