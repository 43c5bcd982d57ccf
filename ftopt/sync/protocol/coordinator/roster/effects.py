"""The effects that the coordinator machine asks of its shell, in order: a decision is journalled before it is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.limits import HISTORY


@dataclass(frozen=True, slots=True)
class SendTo:
    conn: int
    message: m.FromCoordinator


@dataclass(frozen=True, slots=True)
class Close:
    """Close connection ``conn``; nothing more comes from it."""

    conn: int


@dataclass(frozen=True, slots=True)
class Decided:
    """Journal: a version was committed. ``members``: replica, incarnation, steps, last_step, weight, finite. ``done``:
    of fragment 0 with a ledger, all units done so far."""

    fragment: int
    version: int
    attempt: int
    digest: str
    chain: str
    inner_step: int
    members: tuple[tuple[str, int, int, int, float, bool], ...]
    done: Ranges = ()


@dataclass(frozen=True, slots=True)
class Known:
    """Journal: an incarnation is on the roster."""

    replica: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Gone:
    """Journal: an incarnation, and all earlier ones of its replica, are evicted."""

    replica: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Journal: gone incarnations of ``replicas`` are forgotten (HORIZON)."""

    horizon: m.Horizon
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Journal: an incarnation has come to the end of its training (LOSS)."""

    replica: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class LeftEarly:
    """Journal: an incarnation has left before its end, which is a loss if others train on (LOSS); its last known inner
    step. ``replica`` "": nobody has, since a checkpoint was resumed."""

    replica: str
    incarnation: int = 0
    inner_step: int = 0


@dataclass(frozen=True, slots=True)
class Standby:
    """Journal: an incarnation that is on the roster is a spare (SPARE)."""

    replica: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """Journal: the spare ``by``, or the next incarnation of the same replica, trains in the place of a lost incarnation
    (SPARE). ``by`` "": no spare was connected, and the place is still to be taken. ``replica`` "": it is not known in
    whose place ``by`` trains."""

    replica: str
    incarnation: int
    by: str = ""
    by_incarnation: int = 0

    @property
    def lost(self) -> m.IncarnationId:
        """The incarnation whose place is taken; if unknown, a key that no other entry has."""
        return (self.replica, self.incarnation) if self.replica else (f"/{self.by}", self.by_incarnation)

    @property
    def spare(self) -> m.IncarnationId:
        return self.by, self.by_incarnation


@dataclass(frozen=True, slots=True)
class Epoch:
    """Journal: this coordinator's epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """Journal: the job goes on from ``version`` (-1: from nothing); later decisions of ``fragment`` are void."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """Journal: units below ``unit`` may have been granted (CURSOR)."""

    unit: int


@dataclass(frozen=True, slots=True)
class Emit:
    """An event for telemetry."""

    event: str
    replica: str = "coordinator"
    incarnation: int = 0
    fragment: int | None = None
    version: int | None = None
    attempt: int | None = None
    inner_step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Halt:
    """EPOCH: another coordinator has taken over, and this one must stop."""

    reason: str


Journalled = (
    Decided | Known | Gone | Forgotten | Finished | LeftEarly | Standby | Replaced | Epoch | Rollback | Cursor
    | m.JobFailed
)  # fmt: skip
"""`m.JobFailed`: the job has failed, which each of its coordinators says from then on."""
CoordinatorEffect = SendTo | Close | Journalled | Emit | Halt
Effects = list[CoordinatorEffect]


@dataclass(frozen=True)
class JournalState:
    """The state of a journal after a restart."""

    epoch: int
    roster: tuple[m.IncarnationId, ...] = ()
    gone: tuple[m.IncarnationId, ...] = ()
    """Gone incarnations that are not forgotten, in the order in which they went."""
    decided: tuple[Decided, ...] = ()
    """The last decisions of each fragment, oldest first."""
    cursor: int = 0
    finished: tuple[m.IncarnationId, ...] = ()
    """Incarnations at their end: those on the roster, and those that left after the last newcomer came (END)."""
    failed: m.JobFailed | None = None
    standby: tuple[m.IncarnationId, ...] = ()
    """Spares on the roster."""
    replaced: tuple[Replaced, ...] = ()
    """Lost incarnations whose places spares have taken, or are to take."""
    left_early: LeftEarly | None = None
    """The first incarnation that left before its end, since the roster was last empty."""
    horizon: m.Horizon = m.NONE_FORGOTTEN


def replay(entries: Iterable[Journalled]) -> JournalState:
    """The state that results from a journal's entries, in the order of writing."""
    epoch, cursor, roster, gone = 0, 0, dict[str, int](), dict[str, int]()
    decided: dict[int, list[Decided]] = {}
    finished: set[m.IncarnationId] = set()
    left_at: dict[m.IncarnationId, int] = {}
    version = -1
    failed: m.JobFailed | None = None
    left_early: LeftEarly | None = None
    horizon = m.Horizon()
    standby, replaced = set[m.IncarnationId](), dict[m.IncarnationId, Replaced]()
    for entry in entries:
        match entry:
            case Epoch(epoch=number):
                epoch = max(epoch, number)
            case Known(replica=replica, incarnation=incarnation):
                if incarnation > roster.get(replica, 0):
                    finished = {x for x in finished if not m.is_gone(x, gone)}
                roster[replica] = max(incarnation, roster.get(replica, 0))
            case Gone(replica=replica, incarnation=incarnation):
                gone[replica] = max(incarnation, gone.pop(replica, 0))
                left_at[(replica, incarnation)] = version
                if left_early is not None and all(m.is_gone(x, gone) for x in roster.items()):
                    left_early = None  # all have left
            case Forgotten():
                horizon = entry.horizon
                for replica in entry.replicas:
                    if m.is_gone((replica, roster.get(replica, 0)), gone):
                        roster.pop(replica, None)
                    gone.pop(replica, None)
            case LeftEarly():
                left_early = entry if entry.replica else None
            case Standby(replica=replica, incarnation=incarnation):
                standby.add((replica, incarnation))
            case Replaced():
                standby.discard((entry.by, entry.by_incarnation))
                replaced[entry.lost] = entry
            case Cursor(unit=unit):
                cursor = max(cursor, unit)
            case Finished(replica=replica, incarnation=incarnation):
                finished.add((replica, incarnation))
                left_at |= {(replica, incarnation): version} if m.is_gone((replica, incarnation), gone) else {}
            case m.JobFailed():
                failed = failed or entry
            case Rollback(fragment=fragment, version=number):
                decided[fragment] = [d for d in decided.get(fragment, []) if d.version <= number]
            case Decided():
                history = decided.setdefault(entry.fragment, [])
                history.append(entry)
                del history[:-HISTORY]
                version = version if entry.fragment else entry.version
    here = tuple(sorted((r, i) for r, i in roster.items() if not m.is_gone((r, i), gone)))
    known = set(here)
    spares = tuple(x for x in here if x in standby)
    of_use = (x for x in replaced.values() if ({x.lost, x.spare} & known if x.by else spares))
    return JournalState(
        epoch=epoch,
        roster=here,
        gone=tuple(gone.items()),
        decided=tuple(d for f in sorted(decided) for d in decided[f]),
        cursor=cursor,
        finished=tuple(sorted(x for x in finished if x not in left_at or is_end(left_at[x], version))),
        failed=failed,
        standby=spares,
        replaced=tuple(of_use),
        left_early=left_early,
        horizon=horizon,
    )


def is_end(left_at: int, version: int) -> bool:
    """END: whether a job has ended with fragment 0 at ``version``, if a replica at its end left at ``left_at``: one
    more version may be the last steps of others; more versions mean that others train on."""
    return 0 <= version - left_at <= 1


def needed(state: JournalState) -> list[Journalled]:
    """The entries that a journal needs for ``state``: of each fragment's decisions the last one, and as many earlier
    ones as tell a fork from lateness."""
    last = {d.fragment: d.version for d in state.decided}
    return [
        Epoch(state.epoch),
        *(d if d.version == last[d.fragment] else replace(d, members=(), done=()) for d in state.decided),
        *(Known(*incarnation_id) for incarnation_id in state.roster),
        *([Forgotten(state.horizon, ())] if state.horizon.life else []),
        *(Gone(*incarnation_id) for incarnation_id in state.gone),
        *(Finished(*incarnation_id) for incarnation_id in state.finished),
        *([state.left_early] if state.left_early is not None else []),
        *(Standby(*incarnation_id) for incarnation_id in state.standby),
        *state.replaced,
        *([Cursor(state.cursor)] if state.cursor else []),
        *([state.failed] if state.failed is not None else []),
    ]
