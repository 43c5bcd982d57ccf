"""A replica that resumes from a checkpoint: to the protocol, it and all the others were away.

This needs no further rule. A coordinator without memory waits until every replica on a reconnecting one's roster is
heard or gone (WAIT), takes the highest version that a replica holds, and has the others fetch it; an outstanding
contribution is offered again (FREEZE), and COUNT tells which were counted. So the roster that a replica brings decides
for which replicas the job waits, and its gone incarnations for which it does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges, end, intersect, subtract, union
from ftopt.sync.protocol.samples import Samples


@dataclass(frozen=True, slots=True)
class Held:
    """What a replica was, knew and held.

    Args:
        replica: its id.
        incarnation: its life, > 0.
        epoch: the coordinator's.
        gone: replica -> newest gone incarnation that it knew (FENCE).
        forgotten: the latest life of gone incarnations that were removed from ``gone`` (HORIZON).
        roster: replica -> incarnation, of all that come back, itself included.
        adopted_by: missing replica -> the replica that adopts its pending work, as in `Return`.
        records: one per fragment.
        contributions: the outstanding ones.
        samples: the samples that the job's ledger counts; None without a ledger.
        cursor: the ledger's highest cursor that it knew.
        used: units that its pending steps have used.
        queue: its other granted units, in the order in which they are to be used.
    """

    replica: str
    incarnation: int
    epoch: int
    gone: dict[str, int] = field(default_factory=dict)
    roster: dict[str, int] = field(default_factory=dict)
    adopted_by: dict[str, str] = field(default_factory=dict)
    records: tuple[m.Record, ...] = ()
    contributions: tuple[m.Contribution, ...] = ()
    samples: Samples | None = None
    cursor: int = 0
    used: Ranges = ()
    queue: Ranges = ()
    forgotten: int = 0

    @property
    def incarnation_id(self) -> m.IncarnationId:
        """The replica with its life."""
        return self.replica, self.incarnation

    @property
    def lease(self) -> Ranges:
        """TOTAL: all units that it holds."""
        return union(self.used, self.queue)


@dataclass(frozen=True, slots=True)
class Return:
    """The replicas that come back after a checkpoint.

    Args:
        epoch: the highest that a replica knew.
        incarnation_ids: replica -> incarnation, of those present now. A replica in the checkpoint keeps its
            incarnation; another gets the next free one: it holds the newest state and has contributed nothing.
        gone: replica -> newest gone incarnation: all known ones, those that do not come back, and others whose steps
            the state counts.
        adopted_by: missing replica -> the replica that adopts its pending work and the units in it (ADOPT); its other
            granted units are free again.
        forgotten: as in `Held`, the latest that any of them knew.
        cursor: the ledger's highest cursor that any of them knew (CURSOR): a replica that comes back late may hold
            units that no other replica's part names.
        queues: replica -> `Held.queue`, with each unit in one of them: a replica that saved its part late may have been
            granted units that are also in the part of a replica gone by then. Units used by pending steps are in none.
    """

    epoch: int
    incarnation_ids: dict[str, int]
    gone: dict[str, int]
    adopted_by: dict[str, str]
    cursor: int
    queues: dict[str, Ranges]
    forgotten: int


def returning(there: Sequence[Held], present: Iterable[str], newest: Sequence[m.Record]) -> Return:
    """The replicas that come back when ``present`` are here now; every replica computes the same.

    ``there``: every replica in the checkpoint. ``newest``: the newest record of each fragment.
    """
    present, void = sorted(set(present)), given_up(there)
    lives = {x.replica: x.incarnation for x in there if x.replica in present and x.incarnation_id not in void}
    lost = sorted(x.incarnation_id for x in there if x.replica not in present and x.incarnation_id not in void)
    known = [*(x for held in there for x in held.gone.items()), *lost, *_counted(newest)]
    gone = dict(sorted(x for x in known if lives.get(x[0]) != x[1]))  # of each replica the newest
    forgotten = _forgotten(there)
    incarnation_ids = {x: lives.get(x) or max(gone.get(x, 0), forgotten) + 1 for x in present}
    adopters = sorted(lives) or present
    return Return(
        epoch=max(held.epoch for held in there),
        incarnation_ids=incarnation_ids,
        gone={replica: life for replica, life in gone.items() if life < incarnation_ids.get(replica, life + 1)},
        adopted_by={replica: adopters[index % len(adopters)] for index, (replica, _) in enumerate(lost)},
        cursor=_cursor(there),
        queues=_queues(
            [held for held in there if held.replica in lives],
            union(*(held.used for held in there if held.incarnation_id not in void)),
        ),
        forgotten=forgotten,
    )


def given_up(there: Sequence[Held]) -> set[m.IncarnationId]:
    """Incarnations in the checkpoint that were gone when another replica gave its part, which has steps with the same
    units: these had been granted again by then. Nobody takes up the pending work of those that were gone."""
    return {
        early.incarnation_id
        for early, late in itertools.permutations(there, 2)
        if late.gone.get(early.replica, 0) >= early.incarnation and intersect(early.used, late.used)
    }


def apart(there: Sequence[Held], newest: Iterable[m.Record]) -> dict[str, int]:
    """Replica -> life, of replicas whose steps the state counts, that are not in the checkpoint and are not known to be
    gone by any replica in it: they may come back with checkpoints of their own."""
    dead = {x for held in there for x in (*held.gone.items(), held.incarnation_id)}
    return dict(sorted(x for x in _counted(newest) if x not in dead))  # of each replica the newest


def known_to(mine: str, back: Return, there: Sequence[Held], newest: Sequence[m.Record]) -> Return:
    """``back`` as the replica ``mine`` reports it to the coordinator.

    A replica in the checkpoint does not report another that is present and `apart` as gone, but waits for it. In that
    replica's own checkpoint ``mine`` may be missing in turn, and neither must end the other.
    """
    if mine not in {held.replica for held in there}:
        return back
    waited = {x: life for x, life in apart(there, newest).items() if back.incarnation_ids.get(x) == life + 1}
    gone = {replica: life for replica, life in back.gone.items() if replica not in waited}
    return replace(back, incarnation_ids=back.incarnation_ids | waited, gone=gone)


def another_life(incarnation_id: m.IncarnationId, there: Sequence[Held], newest: Iterable[m.Record]) -> Held:
    """RESTORE: the incarnation as which a replica goes on, without records. All those in the checkpoint are gone.

    A coordinator with an old copy of its journal may assign their numbers again, although the state counts their steps
    (COUNT): then the replica goes on as a later one.

    ``incarnation_id``: assigned by the coordinator. ``there`` and ``newest``: as in `returning`.
    """
    known = [*(x for held in there for x in (held.incarnation_id, *held.gone.items())), *_counted(newest)]
    gone = dict(sorted(known))  # of each replica the newest
    replica, life = incarnation_id
    forgotten = _forgotten(there)
    life = max(life, gone.get(replica, 0) + 1, forgotten + 1)
    return Held(replica, life, 0, gone, samples=there[0].samples, cursor=_cursor(there), forgotten=forgotten)


def _queues(there: Iterable[Held], used: Ranges) -> dict[str, Ranges]:
    """The replicas' queues. I3: no unit is in two of them, and each keeps its order."""
    queues: dict[str, Ranges] = {}
    for held in sorted(there, key=lambda held: held.replica):
        queues[held.replica] = tuple(part for each in held.queue for part in subtract((each,), used))
        used = union(used, queues[held.replica])
    return queues


def _cursor(there: Iterable[Held]) -> int:
    return max(max(held.cursor, end(held.lease)) for held in there)


def _forgotten(there: Iterable[Held]) -> int:
    return max(held.forgotten for held in there)


def _counted(newest: Iterable[m.Record]) -> list[m.IncarnationId]:
    return [(replica, life) for record in newest for replica, life, _ in record.counted]
