"""Modelled checkpoints: what ``ftopt.checkpointing`` keeps of replicas, and what these go on from when all have died.

A replica gives its part where its training thread has taken up an outer step of fragment 0. A checkpoint is whole when
every member of that outer step has given its part, and the parts do not contradict each other on COUNT. Who goes on
from it is as it was, or the adopter of others that do not come back: their pending steps, and the units that these have
used, go out with its next contribution (ADOPT).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ftopt.simulate.host import Kept, StepSpan
from ftopt.sync.protocol.intervals import Ranges, union
from ftopt.sync.protocol.messages import IncarnationId, Position
from ftopt.sync.protocol.replica.resumed import Held, another_life, returning

if TYPE_CHECKING:
    from ftopt.simulate.trainer import Process


@dataclass(frozen=True, slots=True)
class SimPart:
    """One replica. ``used``: units, by inner steps; ``given_up``: steps, by fragments; ``floors``: see `Checks`."""

    held: Held
    fragments: tuple[Kept, ...]
    local_steps: int = 0
    used: dict[int, list[int]] = field(default_factory=dict)
    given_up: tuple[frozenset[int], ...] = ()
    floors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Coming:
    """Who comes back, and as what. ``adopted``: whose pending work it takes over, on the newest state then."""

    part: SimPart
    newest: tuple[Kept, ...]
    adopted: tuple[SimPart, ...] = ()

    @property
    def held(self) -> Held:
        """What its machine goes on from."""
        held = self.part.held
        if not self.adopted:
            return held
        used = union(held.used, *(part.held.used for part in self.adopted))
        return replace(held, records=tuple(kept.record for kept in self.newest), contributions=(), used=used)


@dataclass(frozen=True, slots=True)
class SimCheckpoint:
    """A whole one: a part of each replica, by id."""

    parts: dict[str, SimPart]

    @property
    def newest(self) -> tuple[Kept, ...]:
        """Of each fragment, the newest version that any replica stood on."""
        fragments = zip(*(part.fragments for part in self.parts.values()), strict=True)
        return tuple(max(kept, key=lambda x: x.record.version) for kept in fragments)

    @property
    def position(self) -> Position:
        """Of fragment 0."""
        return self.newest[0].record.position

    @property
    def fits(self) -> bool:
        """Whether no part contradicts another one on COUNT."""
        for part in self.parts.values():
            for kept, newest in zip(part.fragments, self.newest, strict=True):
                counted = newest.record.counted_step(*part.held.incarnation_id)
                offered = kept.snapshot.contribution.last_step if kept.snapshot is not None else None
                if counted not in (kept.record.counted_step(*part.held.incarnation_id), offered):
                    return False
                if kept.record.version == newest.record.version and kept.record.chain != newest.record.chain:
                    return False
        return True

    def resumed(self, present: Iterable[str]) -> dict[str, Coming]:
        """Everybody who is ``present`` now, as what the job was told to resume from."""
        newest, there = self.newest, [part.held for part in self.parts.values()]
        back = returning(there, present, [kept.record for kept in newest])
        coming = {}
        for name, incarnation in back.incarnation_ids.items():
            part = self.parts.get(name) or self._blank(name)
            held = replace(
                part.held,
                incarnation=incarnation,
                epoch=back.epoch,
                gone=dict(back.gone),
                roster=dict(back.incarnation_ids),
                adopted_by=dict(back.adopted_by),
            )
            adopted = tuple(
                self.parts[missing] for missing, adopter in sorted(back.adopted_by.items()) if adopter == name
            )
            coming[name] = Coming(replace(part, held=held), newest, adopted)
        return coming

    def another_life(self, incarnation_id: IncarnationId) -> Coming:
        """RESTORE: a newcomer that takes over what its former life had pending."""
        there = [part.held for part in self.parts.values()]
        incarnation_id, gone = another_life(incarnation_id, there, [kept.record for kept in self.newest])
        blank, former = self._blank(incarnation_id[0]), self.parts.get(incarnation_id[0])
        part = replace(blank, held=replace(blank.held, incarnation=incarnation_id[1], gone=gone))
        return Coming(part, self.newest, (former,) if former is not None else ())

    def _blank(self, name: str) -> SimPart:
        """One that was not there: the newest state, and nothing pending."""
        newest = tuple(Kept(kept.record, kept.content) for kept in self.newest)
        some = next(iter(self.parts.values())).held
        held = Held(name, 0, 0, records=tuple(kept.record for kept in newest), samples=some.samples)
        return SimPart(held, newest, given_up=(frozenset(),) * len(newest), floors=(0,) * len(newest))


class SimCheckpoints:
    """A job's folder. ``every``: so many versions of fragment 0 lie between two checkpoints; 0: none."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.whole: list[SimCheckpoint] = []
        self._parts: dict[int, dict[str, SimPart]] = {}

    def due(self, version: int) -> bool:
        """Whether the outer step that has made ``version`` is to be kept."""
        return self.every > 0 and version > 0 and version % self.every == 0

    def write(self, attempt: int, members: Sequence[IncarnationId], part: SimPart) -> None:
        """A part is on the disk; the last one makes the checkpoint whole."""
        parts = self._parts.setdefault(attempt, {})
        parts[part.held.replica] = part
        if all(name in parts and parts[name].held.incarnation_id == (name, life) for name, life in members):
            del self._parts[attempt]
            found = SimCheckpoint(dict(sorted(parts.items())))
            if found.fits and (not self.whole or self.whole[-1].position.version < found.position.version):
                self.whole.append(found)

    def fall_back_on(self, checkpoint: SimCheckpoint) -> None:
        """What is newer, and what was never completed, is void."""
        self.whole = self.whole[: self.whole.index(checkpoint) + 1]
        self._parts.clear()


def give(process: Process) -> None:
    """The training thread has taken up an outer step: this replica's part is copied, and written by and by."""
    world, shard = process.world, process.shards[0]
    if shard.record is None or shard.made is None or not world.checkpoints.due(shard.record.version):
        return
    (attempt, members), shard.made = shard.made, None
    kept = tuple(x.kept() for x in process.shards)
    if any(x.reset for x in process.shards) or process.machine.reset:
        return
    offered = tuple(x.snapshot.contribution for x in kept if x.snapshot is not None)
    used, queue = process.loader.unit_queue.kept() if process.loader is not None else ((), ())
    held = Held(
        process.name,
        process.machine.incarnation,
        process.machine.epoch,
        dict(process.machine.gone),
        records=tuple(x.record for x in kept),
        contributions=offered,
        samples=world.knobs.samples,
        cursor=process.machine.lease.cursor,
        used=union(used, *(c.ranges for c in offered)) if process.loader is not None else (),
        queue=queue,
    )
    checks, incarnation_id = world.checks, process.incarnation_id
    part = SimPart(
        held,
        kept,
        process.local_steps,
        process.loader.steps() if process.loader is not None else {},
        tuple(frozenset(checks.discarded.get((f, incarnation_id), ())) for f in range(len(kept))),
        tuple(checks.floor.get((f, incarnation_id, process.life), 0) for f in range(len(kept))),
    )
    process.later(world.between(0.0, 2.0), world.checkpoints.write, attempt, members, part)


def put(process: Process, coming: Coming) -> None:
    """Makes a process what it comes back as, its machine apart."""
    part, held, checks, incarnation_id = coming.part, coming.held, process.world.checks, coming.part.held.incarnation_id
    process.local_steps = part.local_steps
    for fragment, (shard, kept) in enumerate(zip(process.shards, part.fragments, strict=True)):
        shard.put(kept)
        checks.discarded[(fragment, incarnation_id)] = set(part.given_up[fragment])
        checks.floor[(fragment, incarnation_id, process.life)] = part.floors[fragment]
    if process.loader is not None:
        inherited: Ranges = union(*(x.held.used for x in coming.adopted))
        process.loader.put_back(held.used, held.queue, part.used, inherited)
    if coming.adopted:
        _adopt(process, coming)


def _adopt(process: Process, coming: Coming) -> None:
    """What ``ftopt.optimizer.recovery.adopt`` does: the counters go on until all fragments have room for
    the steps."""
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
        world.checks.discard(incarnation_id, fragment, process.local_steps - own_steps, base_step)
        shard.put(replace(coming.newest[fragment], base_step=base_step, marked_step=local_steps, snapshot=None))
        shard.inherited = tuple((whose, start, stop) for whose, start, stop in spans if start < stop)
    process.local_steps = local_steps
