"""Messages of a replica to its coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.protocol.values import Contribution, IncarnationId, Position, PreparedAttempt


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each connection: everything the sender is, holds and knows.

    ``incarnation`` 0: a newcomer. ``inner_step``: the committed one of what it holds. With a ledger (``samples``):
    ``claim`` is all that the sender holds and has not seen committed (TOTAL), ``done`` belongs to the state of
    fragment 0, ``cursor`` is the highest that it has received, ``wants`` how many units it wants to hold. With a global
    batch: ``units`` is the sender's share of the plan ``plan`` for the next version. ``adopted_by``: of a sender that
    comes out of a checkpoint, who takes over what somebody had pending who does not come back (ADOPT). ``checkpoint``:
    of a sender that holds nothing, the state of fragment 0 that it can restore; its chain is "" when it cannot be read.
    """

    protocol: int
    job: str
    replica: str
    incarnation: int
    rank: int
    size: int
    epoch: int
    address: str
    initial: str
    fragments: int
    lines: dict[str, str]
    settings: dict[str, int | float | str | None]
    positions: tuple[Position, ...]
    contributions: tuple[Contribution, ...]
    prepared: tuple[PreparedAttempt, ...]
    roster: tuple[IncarnationId, ...]
    gone: tuple[IncarnationId, ...]
    inner_step: int
    samples: Samples | None = None
    claim: Ranges = ()
    done: Ranges = ()
    cursor: int = 0
    wants: int = 0
    plan: int = 0
    units: Ranges = ()
    checkpoint: Position | None = None
    adopted_by: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Propose:
    """``now``: its trigger means now, the others are called in at once. ``wants``: units to hold after the commit."""

    contribution: Contribution
    now: bool = False
    wants: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    fragment: int
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The reduction of an attempt failed here, or ended after its attempt: the sender's reducer is free.

    ``peer``: the member that could not be reached, "" when unknown.
    """

    fragment: int
    attempt: int
    reason: str
    peer: str


@dataclass(frozen=True, slots=True)
class Reading:
    """The few numbers that a trigger needs of one fragment: of a replica that holds ``version``."""

    fragment: int
    version: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The heartbeat. ``readings``: at most one a fragment; each is answered by `Means`."""

    state: str
    inner_step: int
    step_s: float
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class Holds:
    """A fetch is complete: the sender now holds this state."""

    position: Position


@dataclass(frozen=True, slots=True)
class Lacks:
    """A fetch failed at every source named; ask for others."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Ask:
    """The sender will soon have used all that it holds; it wants so many units more. Answered by `Grant`."""

    units: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of what the sender was at the start of its round can be fetched from it, the ``serial``-th of its life.

    ``versions``: of the committed state that it was based on, one a fragment.
    """

    serial: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keeps:
    """The sender has fetched that copy of ``incarnation_id``, and keeps it. Answers `Keep`."""

    incarnation_id: IncarnationId
    serial: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """The sender proposes what it has left and then goes."""


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender is gone, in good order."""


@dataclass(frozen=True, slots=True)
class StoreSet:
    """Rendezvous of a process group: ``value`` is base64."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class StoreGet:
    """Asks for a rendezvous key; answered by `StoreValue` once it is set."""

    key: str


FromReplica = (
    Hello | Propose | Prepared | Failed | Heartbeat | Holds | Lacks | Ask | Copied | Keeps | Leaving | Bye | StoreSet
    | StoreGet
)  # fmt: skip
