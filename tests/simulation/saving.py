"""What a process gives to a modelled checkpoint, and how it goes on from one (`tests.simulation.checkpoints`)."""

from __future__ import annotations

from dataclasses import replace

from ftopt.sync.protocol.intervals import Ranges, union
from ftopt.sync.protocol.replica.resumed import Held
from tests.simulation.checkpoints import Coming, SimPart
from tests.simulation.host import StepSpan
from tests.simulation.world import Process


def give(process: Process) -> None:
    """The training thread has applied an outer step: this replica's part is copied, and written a while later."""
    world, shard = process.world, process.shards[0]
    if shard.record is None or shard.made is None or not world.checkpoints.due(shard.record.version):
        return
    (attempt, members), shard.made = shard.made, None
    kept = tuple(x.kept() for x in process.shards)
    if any(x.reset for x in process.shards) or any(f.reset for f in process.machine.fragments):
        return
    offered = tuple(x.snapshot.contribution for x in kept if x.snapshot is not None)
    loader, machine = process.loader, process.machine
    used, queue = loader.unit_queue.kept() if loader is not None else ((), ())
    held = Held(
        process.name,
        machine.incarnation,
        machine.epoch,
        dict(machine.known.gone),
        records=tuple(x.record for x in kept),
        contributions=offered,
        samples=world.knobs.samples,
        cursor=machine.lease.cursor,
        used=union(used, *(c.ranges for c in offered)) if loader is not None else (),
        queue=queue,
        forgotten=machine.known.horizon.life,
    )
    incarnation_id = process.incarnation_id
    part = SimPart(
        held,
        kept,
        process.local_steps,
        dict(loader.used_by) if loader is not None else {},
        tuple(frozenset(world.discarded.get((f, incarnation_id), ())) for f in range(len(kept))),
        tuple(world.floor.get((f, incarnation_id, process.life), 0) for f in range(len(kept))),
        loader.inherited if loader is not None else (),
    )
    process.later(world.between(0.0, 2.0), world.checkpoints.write, attempt, members, part)


def put(process: Process, coming: Coming) -> None:
    """Makes a process what it comes back as, its machine apart."""
    world, part, held, incarnation_id = process.world, coming.part, coming.held, coming.part.held.incarnation_id
    process.local_steps = part.local_steps
    for fragment, (shard, kept) in enumerate(zip(process.shards, part.fragments, strict=True)):
        shard.put(kept)
        world.discarded[(fragment, incarnation_id)] = set(part.given_up[fragment])
        world.floor[(fragment, incarnation_id, process.life)] = part.floors[fragment]
    if process.loader is not None:
        inherited: Ranges = union(part.inherited, *(x.held.used for x in coming.adopted))
        process.loader.put_back(held.used, held.queue, part.used, inherited)
    if coming.adopted:
        _adopt(process, coming)


def _adopt(process: Process, coming: Coming) -> None:
    """What ``ftopt.optimizer.saved.adopt`` does: the counters go on until all fragments have room for the steps."""
    world, incarnation_id = process.world, coming.part.held.incarnation_id
    world.coverage["pending work of a missing replica"] += 1
    pending: list[tuple[int, list[StepSpan], int]] = []
    for fragment, newest in enumerate(coming.newest):
        base_step, inherited = coming.part.fragments[fragment].standing(incarnation_id, newest)
        own_steps, steps, found = coming.part.local_steps - base_step, 0, list(inherited)
        for part in coming.adopted:
            theirs, more = part.fragments[fragment].standing(part.held.incarnation_id, newest)
            steps += part.local_steps - theirs
            found += [*more, (part.held.incarnation_id, theirs, part.local_steps)]
        pending.append((own_steps, found, steps))
    local_steps = process.local_steps + max(steps for _, _, steps in pending)
    for fragment, (own_steps, spans, steps) in enumerate(pending):
        shard = process.shards[fragment]
        base_step = local_steps - own_steps - steps
        world.discard(incarnation_id, fragment, process.local_steps - own_steps, base_step)
        shard.put(replace(coming.newest[fragment], base_step=base_step, marked_step=local_steps, snapshot=None))
        shard.inherited = tuple((whose, start, stop) for whose, start, stop in spans if start < stop)
    process.local_steps = local_steps
