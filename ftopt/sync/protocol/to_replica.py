"""Messages of a coordinator to its replicas."""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.values import NONE_FORGOTTEN, Horizon, IncarnationId, Position


@dataclass(frozen=True, slots=True)
class Welcome:
    """The receiver is let in. ``roster``: all members. ``gone``: all gone incarnations that are not forgotten.
    ``horizon``: as in `RosterUpdate`."""

    epoch: int
    incarnation: int
    roster: tuple[IncarnationId, ...]
    gone: tuple[IncarnationId, ...]
    horizon: Horizon = NONE_FORGOTTEN


@dataclass(frozen=True, slots=True)
class Refuse:
    """The receiver is turned away. ``kind``: ``gone`` (come back as a new incarnation), ``anew`` (the same, and forget
    the roster and the gone incarnations: the job has begun again, and their numbers belong to others), ``final`` (the
    user must act); ``unreadable`` (the hello is invalid) and ``misfit`` (it is of another job or protocol): a newcomer
    gives up, and a replica that was let in before trains on and tries again, since another coordinator let it in.
    All versions of the protocol read this message."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """A text for the receiver's log, such as what the job waits for while it starts or recovers, or that the receiver's
    model or machine differs from the others'."""

    text: str


@dataclass(frozen=True, slots=True)
class Start:
    """Cold start: the receiver's own state is the committed one. ``inner_step``, ``done``: the job's, at that state."""

    position: Position
    inner_step: int
    done: Ranges = ()


@dataclass(frozen=True, slots=True)
class Restore:
    """RESTORE: nobody holds the job's state any more. The receiver restores its newest checkpoint, and comes back with
    it as ``incarnation``. ``roster``: all replicas that were asked to; the job waits for them (WAIT)."""

    incarnation: int
    roster: tuple[IncarnationId, ...] = ()


@dataclass(frozen=True, slots=True)
class Behind:
    """The receiver lacks this state and is to fetch it. ``heal``: although it holds that version. Without sources, for
    the state that the receiver holds: this is the newest."""

    position: Position
    sources: tuple[str, ...]
    heal: bool


@dataclass(frozen=True, slots=True)
class RosterUpdate:
    """Changes of the roster: newly known incarnations, and gone ones (FENCE).

    ``forgotten``: replicas whose gone incarnations need not be remembered, since the ``horizon`` stands for them
    (HORIZON)."""

    known: tuple[IncarnationId, ...]
    gone: tuple[IncarnationId, ...]
    horizon: Horizon = NONE_FORGOTTEN
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallIn:
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Speed:
    """The receiver is ``slow`` from now on, or up to speed again.

    ``factor``: its step time over the usual one in the job. ``step_s``, ``usual_s``: these two. ``before``: the factor
    before; 0: not known. ``for_s``: for how many seconds it has been slow. ``called_in``: rounds call it in early, or
    do without it; else they wait for it.
    """

    slow: bool
    factor: float
    step_s: float
    usual_s: float
    before: float
    for_s: float
    called_in: bool


@dataclass(frozen=True, slots=True)
class Means:
    """Means of the last readings of ``count`` replicas that hold ``version``, of as many numbers as all have sent."""

    fragment: int
    version: int
    count: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TrainOn:
    """No quorum can form for now (too few replicas): do not wait. The contribution stays outstanding."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Void:
    """The contribution is part of no attempt and never will be (nobody had any weight). ``outlier``: as in `Quorum`."""

    fragment: int
    outlier: str = ""


@dataclass(frozen=True, slots=True)
class Quorum:
    """An attempt starts. Of constant size: members come as changes to the last list sent on this connection.

    ``advance``: inner steps that the commit adds to the committed inner step. ``drop``: gone incarnations whose COUNT
    entries the commit removes. ``last_step``: names the receiver's contribution (FREEZE). ``outlier``: why that
    contribution weighs nothing and is not counted, "" when it counts. ``ranges``: all units that the contributions have
    used. ``plan``: the plan that they are shares of (COVER), 0 without a global batch. ``older``: the receiver's
    contribution weighs nothing, like an outlier's, since others are of a later step (`Contribution.at_step`).
    """

    fragment: int
    version: int
    attempt: int
    group: int
    rank: int
    size: int
    last_step: int
    total_weight: float
    contributors: int
    advance: int
    joined: tuple[IncarnationId, ...]
    left: tuple[IncarnationId, ...]
    drop: tuple[IncarnationId, ...]
    outlier: str = ""
    ranges: Ranges = ()
    plan: int = 0
    older: bool = False

    @property
    def excludes(self) -> bool:
        """Whether the receiver's contribution weighs nothing."""
        return self.older or bool(self.outlier)


@dataclass(frozen=True, slots=True)
class Abort:
    fragment: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    fragment: int
    version: int
    attempt: int
    digest: str
    chain: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Units that the receiver holds from now on, in addition to its others.

    ``cursor``: no unit from there on is granted before all have received a higher one. ``out_of_units``: there is
    nothing more to grant for now.
    """

    ranges: Ranges
    cursor: int
    out_of_units: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The newest plan of the global batch that makes ``version``; sent again after a reconnection.

    ``units``: the receiver's share. ``ended``: there is no such batch, since every unit of the job is done.
    """

    version: int
    plan: int
    units: Ranges
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Keep:
    """The receiver fetches the ``serial``-th copy of ``incarnation_id`` from ``source``, and keeps it."""

    incarnation_id: IncarnationId
    serial: int
    source: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The receiver's ``serial``-th copy is with ``keeper``, or, with a ``reason``, could not be fetched by it: the next
    copy may be made. ``keeper`` "": no other replica is there to keep copies; ``serial`` is then 0."""

    serial: int
    keeper: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Inherit:
    """To a newcomer: the units of its gone predecessor ``incarnation_id`` are now its own (ADOPT).

    ``source`` keeps a copy of the predecessor, from which to repeat its work. ``inner_step``: its last known one.
    """

    incarnation_id: IncarnationId
    ranges: Ranges
    source: str
    inner_step: int


@dataclass(frozen=True, slots=True)
class JobFailed:
    """LOSS: the job has ended for all at its last versions, since ``replica`` was lost. Also the answer to every hello
    from then on, and the journal's entry. ``lost_step``: the last known inner step of ``replica``. ``versions``: one
    per fragment; ``inner_step``: the committed one. ``at_s``: when, in seconds since 1970."""

    replica: str
    incarnation: int
    why: str
    lost_step: int
    versions: tuple[int, ...]
    inner_step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Promote:
    """SPARE: the receiver stands by no longer, and trains in the place of the lost ``replica``; "": the coordinator
    does not remember which."""

    replica: str


@dataclass(frozen=True, slots=True)
class JobStopped:
    """``replica`` has stopped the job: the receiver's loop is to end."""

    reason: str
    replica: str


@dataclass(frozen=True, slots=True)
class End:
    """The receiver, which is at its end, need not wait any longer.

    ``positions``: of the state with which it ends, one per fragment. ``alike``: replicas that end with this state,
    including the receiver; ``differ``: those that have ended with another state; ``awaited``: those that have not come
    in time. ``whole``: the state is the newest.
    """

    positions: tuple[Position, ...]
    alike: tuple[str, ...]
    differ: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Over:
    """The receiver is a spare that is not needed any more (SPARE), or comes after the end of its job (END). The
    connection ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class StoreValue:
    """Answer to `StoreGet`; ``value`` is base64."""

    key: str
    value: str


FromCoordinator = (
    Welcome | Refuse | Hold | Start | Restore | Behind | RosterUpdate | CallIn | Speed | Means | TrainOn | Void | Quorum
    | Abort | Commit | Grant | Plan | Keep | Kept | Inherit | JobFailed | StoreValue
    | Promote | JobStopped | End | Over
)  # fmt: skip
