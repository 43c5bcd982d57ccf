"""Modelled checkpoints: what `ftopt.checkpoint.checkpoints` keeps of replicas, and what these go on from when all have
died.

A replica gives its part where its training thread has taken up an outer step of fragment 0. A checkpoint is whole when
every member of that outer step has given its part, and the parts do not contradict each other on COUNT. A replica
that goes on from it is as it was, or the adopter of others that do not come back: their pending steps, and the units
that these have used, go out with its next contribution (ADOPT).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ftopt.sync.protocol.intervals import Ranges, union
from ftopt.sync.protocol.messages import IncarnationId, Position
from ftopt.sync.protocol.replica.resumed import Held, another_life, given_up, known_to, returning
from tests.simulation.host import Kept


@dataclass(frozen=True, slots=True)
class SimPart:
    """One replica. ``used``: units, by inner steps; ``inherited``: units of others' steps; ``given_up``: steps, by
    fragments; ``floors``: see `Checks`."""

    held: Held
    fragments: tuple[Kept, ...]
    local_steps: int = 0
    used: dict[int, list[int]] = field(default_factory=dict)
    given_up: tuple[frozenset[int], ...] = ()
    floors: tuple[int, ...] = ()
    inherited: Ranges = ()


@dataclass(frozen=True, slots=True)
class Coming:
    """A replica that comes back. ``adopted``: the parts whose pending work it adopts, on the newest state then."""

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
        """All replicas that are ``present`` now, each with the part that it resumes from."""
        newest, there = self.newest, [part.held for part in self.parts.values()]
        records = [kept.record for kept in newest]
        alike = returning(there, present, records)
        coming = {}
        for name, incarnation in alike.incarnation_ids.items():
            back = known_to(name, alike, there, records)
            part = self.parts.get(name)
            if part is None or part.held.incarnation_id in given_up(there):
                part = self._blank(name)
            held = replace(part.held, incarnation=incarnation, epoch=back.epoch, gone=dict(back.gone))
            roster, adopted_by = dict(back.incarnation_ids), dict(back.adopted_by)
            held = replace(held, roster=roster, adopted_by=adopted_by, cursor=back.cursor)
            held = replace(held, queue=back.queues.get(name, ()), forgotten=back.forgotten)
            missing = sorted(gone for gone, adopter in back.adopted_by.items() if adopter == name)
            coming[name] = Coming(replace(part, held=held), newest, tuple(self.parts[x] for x in missing))
        return coming

    def another_life(self, incarnation_id: IncarnationId) -> Coming:
        """RESTORE: a newcomer that adopts what its former life had pending."""
        there = [part.held for part in self.parts.values()]
        held = another_life(incarnation_id, there, [kept.record for kept in self.newest])
        blank, former = self._blank(held.replica), self.parts.get(held.replica)
        part = replace(blank, held=replace(held, records=blank.held.records))
        void = former is None or former.held.incarnation_id in given_up(there)
        return Coming(part, self.newest, () if void or former is None else (former,))

    def _blank(self, name: str) -> SimPart:
        """A replica without a part: the newest state, and nothing pending."""
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
