"""A modelled training thread: inner steps, and at their boundaries what ``ftopt.optimizer.outer.step`` does."""

from __future__ import annotations

import math

from ftopt.simulate.backups import SimBackup
from ftopt.simulate.loader import Loader
from ftopt.simulate.saving import give
from ftopt.simulate.world import Process


class InnerSteps:
    """Of one life of a process: a method that takes steps of its own between outer steps."""

    def __init__(self, process: Process, backup: SimBackup) -> None:
        self.waits: int | None = None
        """The fragment whose contribution it waits for."""
        self._process = process
        self._backup = backup
        self._world = process.world
        self._offered = False
        self._spent_s = -math.inf

    @property
    def state(self) -> str:
        """What it reports."""
        if self.waits is not None:
            return "waiting"
        loader = self._process.loader
        return "out_of_units" if loader is not None and loader.waits else "training"

    @property
    def step_s(self) -> float:
        """Seconds of a step, as reported."""
        return self._process.step_s

    def begin(self) -> None:
        """There is a state to train on."""
        self._process.later(self._process.step_s, self._step)

    def poke(self) -> None:
        """Something may have changed."""
        if self.waits is not None and not self._waiting(self.waits):
            self.waits = None
            self._process.later(0.0, self._boundary)

    def _step(self) -> None:
        if self._process.gone:
            return
        if self._world.now < self._process.hung_until_s:
            self._process.later(self._process.hung_until_s - self._world.now, self._step)
            return
        if self._process.loader is not None and not self._process.loader.draw(self._process.local_steps + 1):
            self._idle(self._process.loader)
            return
        self._process.local_steps += 1
        self._boundary()

    def _idle(self, loader: Loader) -> None:
        """What `Units.take` does while there are no units; at the end of the data the rest is offered."""
        for fragment in range(len(self._process.shards)):
            self._take_over(fragment)
            pending = self._process.local_steps > self._process.shards[fragment].base_step
            if not fragment and loader.unit_queue.offer() and self._world.now >= self._spent_s + 2.0:
                pending, self._spent_s = True, self._world.now
            if (
                loader.waits
                and not self._process.machine.fragments[fragment].outstanding
                and (pending or self._process.machine.fragments[fragment].called_in)
            ):
                self._propose(fragment, now=False)
        if not self._process.alive:
            return
        if self._process.leaving and not any(self._waiting(f) for f in range(len(self._process.shards))):
            self._process.goodbye()
        else:
            self._process.later(self._world.between(0.1, 0.3), self._step)

    def _boundary(self) -> None:
        """What `OuterStep.boundary` does; then the next step, unless it waits."""
        if self._process.gone:
            return
        if self._world.now < self._process.hung_until_s:
            self._process.later(self._process.hung_until_s - self._world.now, self._boundary)
            return
        for fragment, shard in enumerate(self._process.shards):
            self._take_over(fragment)
            due = self._process.local_steps - shard.marked_step >= self._world.knobs.sync_every
            now = self._world.knobs.hasty > 0 and self._world.chance(self._world.knobs.hasty)
            rest = self._process.leaving and not self._offered and self._process.local_steps > shard.base_step
            if (
                due or now or rest or self._process.machine.fragments[fragment].called_in
            ) and not self._process.machine.fragments[fragment].outstanding:
                self._offered = self._offered or rest
                self._propose(fragment, now=now)
            if (due or now or self._process.leaving) and self._waiting(fragment):
                self.waits = fragment
                return
            self._take_over(fragment)
        if self._process.leaving and (
            self._offered or all(self._process.local_steps == s.base_step for s in self._process.shards)
        ):
            self._process.goodbye()
        else:
            self._process.later(self._process.step_s * self._world.between(0.8, 1.2), self._step)

    def _waiting(self, fragment: int) -> bool:
        f = self._process.machine.fragments[fragment]
        return f.outstanding and not f.released

    def _take_over(self, fragment: int) -> None:
        shard = self._process.shards[fragment]
        begins = shard.counted
        if shard.take_over(self._process.local_steps):
            self._process.count_anew(fragment)
            if self._process.loader is not None and not fragment:
                self._process.loader.redo()
        if not fragment:
            give(self._process)
        if begins and not shard.counted:
            self._backup.begin()

    def _propose(self, fragment: int, *, now: bool) -> None:
        shard, before = self._process.shards[fragment], self._process.shards[fragment].base_step
        if fragment in self._process.installing:
            return
        finite = not self._world.chance(self._world.knobs.nonfinite)
        knobs = self._world.knobs
        contribution = shard.propose(
            self._process.incarnation_id,
            self._process.local_steps,
            finite=finite,
            ranges=self._process.loader.unit_queue.offer() if self._process.loader is not None and not fragment else (),
            overlap_s=knobs.overlap_steps * self._process.step_s,
            grace=knobs.grace,
        )
        if contribution is None:
            return
        if not finite:
            self._world.discard(self._process.incarnation_id, fragment, before, self._process.local_steps)
        if self._world.strike():
            self._process.misfortune()
            if not self._process.alive:
                return
        effects = self._process.machine.propose(contribution, now=now)
        if self._process.loader is not None and self._process.machine.fragments[0].contribution is contribution:
            self._process.check_offered(before, contribution)
        self._process.act(effects)
