"""A replica that comes back out of a checkpoint: to the protocol it was away, and so were all the others.

Nothing new is needed for that: a coordinator that knows nothing waits until every replica on a reconnecting one's
roster was heard or is gone (WAIT), takes the highest version that anybody holds for the truth, and has the others fetch
it; an outstanding contribution is offered again (FREEZE), and COUNT tells whose was counted. So the roster that a
replica brings along decides whom the job waits for, and the gone incarnations who is not expected any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges, union
from ftopt.sync.protocol.samples import Samples


@dataclass(frozen=True, slots=True)
class Held:
    """What a replica was, knew and held.

    Args:
        replica: its id.
        incarnation: its life, > 0.
        epoch: the coordinator's.
        gone: replica -> newest gone incarnation, as it knew them (FENCE).
        roster: replica -> incarnation, of all who come back, itself included.
        adopted_by: replica that does not come back -> who takes its pending work over, as `Return` has it.
        records: one a fragment.
        contributions: that are outstanding.
        samples: what the job's ledger counts; None without one.
        cursor: of the ledger, the highest that it was told.
        used: units that its pending steps have used.
        queue: units that it was granted besides, in the order in which they are to be used.
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

    @property
    def incarnation_id(self) -> m.IncarnationId:
        """The replica with its life."""
        return self.replica, self.incarnation

    @property
    def lease(self) -> Ranges:
        """TOTAL: all that it holds of the ledger."""
        return union(self.used, self.queue)


@dataclass(frozen=True, slots=True)
class Return:
    """Who comes back after a checkpoint.

    Args:
        epoch: the highest that anybody knew.
        marks: those who are there now. One that was there before keeps its incarnation; another one gets the next
            that is free: it holds the newest state and has contributed nothing.
        gone: gone incarnations: all that were known, those who do not come back, and whose steps the state counts
        besides.
        adopted_by: missing replica -> who takes its pending work over, and the units in it (ADOPT);
            what it was granted besides is free again.
    """

    epoch: int
    incarnation_ids: dict[str, int]
    gone: dict[str, int]
    adopted_by: dict[str, str]


def returning(there: Sequence[Held], present: Iterable[str], newest: Sequence[m.Record]) -> Return:
    """Who comes back when ``present`` are there now, of ``there`` in the checkpoint: alike whoever computes it.

    Args:
        there: every replica in the checkpoint.
        present: ids.
        newest: the newest record of each fragment.
    """
    present = sorted(set(present))
    lives = {held.replica: held.incarnation for held in there if held.replica in present}
    gone: dict[str, int] = {}
    lost = [held.incarnation_id for held in there if held.replica not in present]
    counted = [(replica, life) for record in newest for replica, life, _ in record.counted]
    for replica, life in [*(incarnation_id for held in there for incarnation_id in held.gone.items()), *lost, *counted]:
        if lives.get(replica) != life:
            gone[replica] = max(life, gone.get(replica, 0))
    incarnation_ids = {replica: lives.get(replica) or gone.get(replica, 0) + 1 for replica in present}
    adopted_by = sorted(lives) or present
    return Return(
        epoch=max(held.epoch for held in there),
        incarnation_ids=incarnation_ids,
        gone={replica: life for replica, life in gone.items() if life < incarnation_ids.get(replica, life + 1)},
        adopted_by={replica: adopted_by[index % len(adopted_by)] for index, (replica, _) in enumerate(sorted(lost))},
    )


def another_life(
    incarnation_id: m.IncarnationId, there: Sequence[Held], newest: Iterable[m.Record]
) -> tuple[m.IncarnationId, dict[str, int]]:
    """RESTORE: the life as which a replica goes on that was given ``incarnation_id``, and all lives that are gone.

    These are all that the checkpoint knows of. A coordinator with an old copy of its journal may give their numbers
    again, although the state counts their steps (COUNT): then the replica goes on as a later one.

    Args:
        mark: what the coordinator has given.
        there: every replica in the checkpoint.
        newest: the newest record of each fragment.
    """
    gone: dict[str, int] = {}
    counted = [(replica, life) for record in newest for replica, life, _ in record.counted]
    for replica, life in [*(known for held in there for known in (held.incarnation_id, *held.gone.items())), *counted]:
        gone[replica] = max(life, gone.get(replica, 0))
    return (incarnation_id[0], max(incarnation_id[1], gone.get(incarnation_id[0], 0) + 1)), gone
