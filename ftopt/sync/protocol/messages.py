"""The messages of the outer-sync protocol: plain frozen dataclasses, and their JSON form with exact errors.

``docs/protocol.md`` says what each one means and when it is sent. A *mark* is a pair ``(replica, incarnation)``. The
JSON form of a message is an object with its field names and ``type``: the class name. Unknown types, missing, extra and
ill-typed fields are refused with a `MessageError` that names them; nothing but JSON is ever parsed.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.protocol.wire import MessageError as MessageError
from ftopt.sync.protocol.wire import build_value, parse, shallow

PROTOCOL = 3
"""Version of this protocol, and of what members send each other in a reduction. A replica and a coordinator with
different ones refuse each other."""

IncarnationId = tuple[str, int]
T = typing.TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contribution:
    """What the protocol knows of a replica's payload for the next version of one fragment (FREEZE: immutable).

    Args:
        fragment: the fragment.
        version: the version it builds on (the one taken up last).
        steps: inner steps in it: ``last_step`` minus the holder's last counted step.
        last_step: the holder's own count of executed inner steps at the snapshot, in this incarnation.
        weight: its weight in the mean, >= 0 (DiLoCo, LocalSGD: ``steps``). 0: sends zeros, receives the result.
        tokens: tokens in it, 0 when not counted.
        norm: L2 norm of its outer gradient, 0 when not finite.
        finite: False when a NaN or Inf is in it (its weight is then 0).
        ranges: units ``(start, stop)`` that its steps have used, and steps before them that came to nothing; empty
            without a ledger, and of any fragment but 0.
        overlap_s: how long its holder trains on without the result: ``delay`` of its steps.
        grace: gamma of the adaptive grace (`pace`), >= 0. 0: the grace is ``grace_s``.
        plan: the plan that ``ranges`` are a share of (`plans`); 0 without a global batch.
    """

    fragment: int
    version: int
    steps: int
    last_step: int
    weight: float
    tokens: int = 0
    norm: float = 0.0
    finite: bool = True
    ranges: Ranges = ()
    overlap_s: float = 0.0
    grace: float = 0.0
    plan: int = 0


def excluded(contribution: Contribution) -> Contribution:
    """What an outlier takes part with: nothing new, so that COUNT keeps what it has."""
    counted = contribution.last_step - contribution.steps
    return replace(contribution, steps=0, last_step=counted, weight=0.0, tokens=0, ranges=())


@dataclass(frozen=True, slots=True)
class Position:
    """Which committed state of a fragment a replica holds: ``version`` outer steps, told apart by the hash chain."""

    fragment: int
    version: int
    chain: str


@dataclass(frozen=True, slots=True)
class PreparedAttempt:
    """An attempt that a replica has prepared and whose fate it does not know."""

    fragment: int
    attempt: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Record:
    """The protocol's part of a fragment's committed state; it travels with the tensors.

    Args:
        fragment: the fragment.
        version: committed outer steps.
        chain: hash chain over all results (CHAIN).
        inner_step: the fragment's committed inner step; fragment 0's is the job's.
        counted: COUNT: ``(replica, incarnation, last inner step included)``, sorted.
        done: fragment 0, with a ledger: units that are in the committed state.
    """

    fragment: int
    version: int
    chain: str
    inner_step: int
    counted: tuple[tuple[str, int, int], ...] = ()
    done: Ranges = ()

    @property
    def position(self) -> Position:
        return Position(self.fragment, self.version, self.chain)

    def counted_step(self, replica: str, incarnation: int) -> int:
        """The last inner step of that incarnation that is in the committed state, 0 when none is."""
        at = bisect.bisect_left(self.counted, (replica, incarnation, 0))
        found = self.counted[at : at + 1]
        return found[0][2] if found and found[0][:2] == (replica, incarnation) else 0


def first_chain(fragment: int, epoch: int, initial_source: str, initial: str) -> str:
    """CHAIN of version 0: it tells one start of a job from any other, also of the same initial state."""
    return hashlib.sha256(f"{fragment}|{epoch}|{initial_source}|{initial}".encode()).hexdigest()[:32]


def next_chain(chain: str, fragment: int, version: int, digest: str) -> str:
    """CHAIN: the hash of ``version``, made from its predecessor's and the agreed digest of its result.

    Its first 8 digits are those of version 0, so that histories of different starts are told apart at any version.
    """
    return chain[:8] + hashlib.sha256(f"{chain}|{fragment}|{version}|{digest}".encode()).hexdigest()[:24]


def same_start(a: str, b: str) -> bool:
    """Whether two chains come from one cold start."""
    return a[:8] == b[:8]


def is_gone(incarnation_id: IncarnationId, gone: Mapping[str, int]) -> bool:
    """Whether ``gone`` (replica -> newest gone incarnation; older ones are gone with it) covers ``incarnation_id``."""
    return incarnation_id[1] <= gone.get(incarnation_id[0], 0)


# ---------------------------------------------------------------- replica -> coordinator


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each connection: everything the sender is, holds and knows.

    ``incarnation`` 0: a newcomer. ``inner_step``: the committed one of what it holds. With a ledger (``samples``):
    ``claim`` is all that the sender holds and has not seen committed (TOTAL), ``done`` belongs to the state of
    fragment 0, ``cursor`` is the highest that it was told, ``wants`` how many units it wants to hold. With a global
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


# ---------------------------------------------------------------- coordinator -> replica


@dataclass(frozen=True, slots=True)
class Welcome:
    epoch: int
    incarnation: int
    roster: tuple[IncarnationId, ...]
    gone: tuple[IncarnationId, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """``kind``: ``gone`` (come back as a new incarnation), ``final`` (the user must act), or ``unreadable``: the hello
    was none (a newcomer gives up; who was let in before trains on and comes again)."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """The job has not started, or recovers; ``text`` says what it waits for."""

    text: str


@dataclass(frozen=True, slots=True)
class Start:
    """Cold start: the receiver's own state is the committed one. ``inner_step``, ``done``: the job's, from there."""

    position: Position
    inner_step: int
    done: Ranges = ()


@dataclass(frozen=True, slots=True)
class Restore:
    """RESTORE: nobody holds the job's state any more. The receiver is to restore its newest checkpoint, and to come
    back with that as ``incarnation``. ``roster``: who else was told so: it is to be waited for (WAIT)."""

    incarnation: int
    roster: tuple[IncarnationId, ...] = ()


@dataclass(frozen=True, slots=True)
class Behind:
    """The receiver lacks this state and is to fetch it. ``heal``: although its version is the same."""

    position: Position
    sources: tuple[str, ...]
    heal: bool


@dataclass(frozen=True, slots=True)
class RosterUpdate:
    """Changes of the roster: replicas that are known now, and gone incarnations (FENCE)."""

    known: tuple[IncarnationId, ...]
    gone: tuple[IncarnationId, ...]


@dataclass(frozen=True, slots=True)
class CallIn:
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Means:
    """Means of the last readings of ``count`` replicas that hold ``version``: as many numbers as all of them told."""

    fragment: int
    version: int
    count: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TrainOn:
    """No quorum can form for now (too few replicas): don't wait. The contribution stays outstanding."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Void:
    """The contribution is part of no attempt and never will be (nobody had any weight)."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Quorum:
    """An attempt starts. Of constant size: members come as a change of the last list sent on this connection.

    ``advance``: inner steps that the commit adds to the committed inner step. ``drop``: gone incarnations whose COUNT
    entries the commit removes. ``last_step``: the receiver's contribution that is meant (FREEZE). ``outlier``: why
    that one weighs nothing and is not counted, "" when it is taken. ``ranges``: all units that the contributions have
    used. ``plan``: the one that they are shares of (COVER), 0 without a global batch.
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
    """Units that the receiver holds from now on, beside what it has.

    ``cursor``: no unit from there on is granted before all are told of another one. ``out_of_units``: there is nothing
    more to grant for now.
    """

    ranges: Ranges
    cursor: int
    out_of_units: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The newest plan of the global batch that makes ``version``; the same one again to who comes back.

    ``units``: the receiver's share. ``ended``: there is no such batch, every unit of the job is done.
    """

    version: int
    plan: int
    units: Ranges
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Keep:
    """The receiver is to fetch the ``serial``-th copy of ``incarnation_id`` at ``source``, and to keep it."""

    incarnation_id: IncarnationId
    serial: int
    source: str


@dataclass(frozen=True, slots=True)
class Inherit:
    """To a newcomer: what its predecessor ``incarnation_id``, which is gone, held of the ledger is the receiver's
    (ADOPT).

    ``source`` keeps a copy of it, from which its work can be done again. ``inner_step``: how far it had come, as far as
    it had told.
    """

    incarnation_id: IncarnationId
    ranges: Ranges
    source: str
    inner_step: int


@dataclass(frozen=True, slots=True)
class StoreValue:
    """Answer to `StoreGet`; ``value`` is base64."""

    key: str
    value: str


FromReplica = (
    Hello | Propose | Prepared | Failed | Heartbeat | Holds | Lacks | Ask | Copied | Keeps | Leaving | Bye | StoreSet
    | StoreGet
)  # fmt: skip
FromCoordinator = (
    Welcome | Refuse | Hold | Start | Restore | Behind | RosterUpdate | CallIn | Means | TrainOn | Void | Quorum | Abort
    | Commit | Grant | Plan | Keep | Inherit | StoreValue
)  # fmt: skip

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=shallow)
_TYPES: dict[str, type] = {t.__name__: t for t in (*typing.get_args(FromReplica), *typing.get_args(FromCoordinator))}


def encode(message: FromReplica | FromCoordinator) -> str:
    """The JSON text of a message."""
    return _ENCODER.encode({"type": type(message).__name__, **shallow(message)})


def decode(text: str) -> FromReplica | FromCoordinator:
    """The message in ``text``.

    Raises:
        MessageError: it is none; says which field is wrong.
    """
    data = parse(text)
    if not isinstance(data, dict):
        raise MessageError(f"a message is a JSON object, got {type(data).__name__}")
    kind = data.pop("type", None)
    cls = _TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MessageError(f"unknown message type {kind!r:.80}")
    return typing.cast("FromReplica | FromCoordinator", build_value(cls, data, cls.__name__))


def from_plain(cls: type[T], data: Any) -> T:
    """An instance of a message part (`Contribution`, ...) from its JSON value; raises `MessageError`."""
    return typing.cast(T, build_value(cls, data, cls.__name__))
