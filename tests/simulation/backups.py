"""Modelled copies of replicas (``recover: replay``), as ``sync.neighbour`` and ``optimizer.replay`` make them."""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges, contains, in_order
from tests.simulation.host import SimCopy
from tests.simulation.world import Process


class SimBackup:
    """Of one life of a process: makes its copy, and fetches those that it keeps of others."""

    def __init__(self, process: Process) -> None:
        self.inheriting = False
        """A predecessor's copy is being fetched: training waits."""
        self._process = process
        self._world = process.world
        self._serial = self._settled = self._copied_step = 0

    def between(self) -> None:
        """Between two inner steps of a round, if it is time for a further copy: training thread."""
        process, every = self._process, self._world.knobs.copy_every
        if not every or process.local_steps - self._copied_step < every or self._settled < self._serial:
            return
        if any(f.outstanding for f in process.machine.fragments) or any(s.applied is None for s in process.shards):
            return
        self._world.coverage["a copy in the middle of a round"] += 1
        self.begin()

    def kept(self, told: m.Kept) -> None:
        """What has become of the newest copy."""
        self._settled = max(self._settled, told.serial)

    def begin(self) -> None:
        """A round of its own is taken up: training thread."""
        process = self._process
        if process.loader is None or not self._world.knobs.replay or any(f.reset for f in process.machine.fragments):
            return
        if any(shard.reset for shard in process.shards):
            return
        kept = [shard.kept() for shard in process.shards]
        pending = tuple(
            tuple(x for x in (*k.inherited, (process.incarnation_id, k.base_step, process.local_steps)) if x[1] < x[2])
            for k in kept
        )
        used, queue = process.loader.unit_queue.kept()
        self._copied_step = process.local_steps
        process.own_copy = SimCopy(process.incarnation_id, pending, used, queue)
        self._serial += 1
        versions = tuple(k.record.version for k in kept)
        serial = self._serial
        process.later(self._world.delay(), lambda: process.act(process.machine.say(m.Copied(serial, versions))))

    def keep(self, order: m.Keep) -> None:
        """The coordinator has named a copy to be kept."""
        self._process.later(self._world.fetch_s(), self._keep, order)

    def _keep(self, order: m.Keep) -> None:
        source = self._world.processes.get(order.source)  # None: a second process, which ends when it is let in
        if source is None or not source.alive or source.frozen or self._world.chance(0.05):
            self._world.coverage["a copy cannot be fetched"] += 1
            self._process.act(self._process.machine.say(m.KeepFailed(order.incarnation_id, order.serial, "no answer")))
            return
        if source.incarnation_id == order.incarnation_id and source.own_copy is not None:
            self._process.kept_copies[order.incarnation_id[0]] = source.own_copy
            self._world.coverage["a copy is kept"] += 1
            self._process.act(self._process.machine.say(m.Keeps(order.incarnation_id, order.serial)))

    def inherit(self, order: m.Inherit) -> None:
        """This process comes in the place of one that has died."""
        self.inheriting = True
        self._process.later(self._world.fetch_s(), self._inherit, order)

    def _inherit(self, order: m.Inherit) -> None:
        source = self._world.processes[order.source]
        copy = source.kept_copies.get(order.incarnation_id[0]) if source.alive and not source.frozen else None
        self._start(order.ranges, copy if copy is not None and copy.incarnation_id == order.incarnation_id else None)

    def _start(self, ranges: Ranges, copy: SimCopy | None) -> None:
        process = self._process
        if not process.machine.ready:  # the committed state comes first
            process.later(self._world.delay(), self._start, ranges, copy)
            return
        self.inheriting = False
        if process.loader is not None and contains(process.machine.lease.held, ranges):
            known = (*copy.used, *copy.queue) if copy is not None else ()
            process.loader.unit_queue.grant_first(in_order(ranges, known))
            # One that was reset is training already: its steps are void, their units are used again.
            if copy is not None and not process.stepping and contains(ranges, copy.used):
                self._take_up(copy)
        process.act([])

    def _take_up(self, copy: SimCopy) -> None:
        """What ``ftopt.optimizer.saved.replay.take_up`` does: pending work is this one's, the rest is done again."""
        process, world = self._process, self._world
        assert process.loader is not None
        world.coverage["a dead one's steps are done again"] += 1
        world.coverage["pending work of a dead one is taken over"] += any(copy.pending)
        steps = [sum(stop - start for _, start, stop in spans) for spans in copy.pending]
        process.local_steps = max(steps)
        for fragment, (shard, spans) in enumerate(zip(process.shards, copy.pending, strict=True)):
            shard.base_step = process.local_steps - steps[fragment]
            shard.marked_step, shard.inherited = process.local_steps, spans
            world.discard(process.incarnation_id, fragment, 0, shard.base_step)
        if any(copy.pending):
            process.loader.unit_queue.spend(copy.used)
            process.loader.inherited = copy.used
