"""The messages of the outer-sync protocol: plain frozen dataclasses, and their JSON form with exact errors.

``docs/protocol.md`` says what each one means and when it is sent. A *mark* is a pair ``(replica, incarnation)``. The
JSON form of a message is an object with its field names and ``type``: the class name. Unknown types, missing, extra and
ill-typed fields are refused with a `MessageError` that names them; nothing but JSON is ever parsed.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

PROTOCOL = 1
"""Version of this protocol. A replica and a coordinator with different ones refuse each other."""

Mark = tuple[str, int]
T = typing.TypeVar("T")


class MessageError(ValueError):
    """The text is not a message of this protocol."""


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
        ranges: sample ranges ``(start, stop)`` used for it; empty without a ledger.
    """

    fragment: int
    version: int
    steps: int
    last_step: int
    weight: float
    tokens: int = 0
    norm: float = 0.0
    finite: bool = True
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Which committed state of a fragment a replica holds: ``version`` outer steps, told apart by the hash chain."""

    fragment: int
    version: int
    chain: str


@dataclass(frozen=True, slots=True)
class PreparedMark:
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
        inner_step: the job's committed inner step (grows with fragment 0).
        counted: COUNT: ``(replica, incarnation, last inner step included)``, sorted.
        ledger: the sample ledger, opaque here.
        ledger_commit: the ledger's own commit number.
    """

    fragment: int
    version: int
    chain: str
    inner_step: int
    counted: tuple[tuple[str, int, int], ...] = ()
    ledger: str = ""
    ledger_commit: int = 0

    @property
    def position(self) -> Position:
        return Position(self.fragment, self.version, self.chain)

    def counted_step(self, replica: str, incarnation: int) -> int:
        """The last inner step of that incarnation that is in the committed state, 0 when none is."""
        return next((step for name, life, step in self.counted if (name, life) == (replica, incarnation)), 0)


def next_chain(chain: str, fragment: int, version: int, digest: str) -> str:
    """CHAIN: the hash of ``version``, made from its predecessor's and the agreed digest of its result."""
    return hashlib.sha256(f"{chain}|{fragment}|{version}|{digest}".encode()).hexdigest()[:32]


def is_gone(mark: Mark, gone: Mapping[str, int]) -> bool:
    """Whether ``gone`` (replica -> newest gone incarnation; older ones are gone with it) covers ``mark``."""
    return mark[1] <= gone.get(mark[0], 0)


# ---------------------------------------------------------------- replica -> coordinator


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each connection: everything the sender is, holds and knows.

    ``incarnation`` 0: a newcomer. ``inner_step``: the committed one of what it holds.
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
    prepared: tuple[PreparedMark, ...]
    roster: tuple[Mark, ...]
    gone: tuple[Mark, ...]
    inner_step: int


@dataclass(frozen=True, slots=True)
class Propose:
    contribution: Contribution


@dataclass(frozen=True, slots=True)
class Prepared:
    fragment: int
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The reduction of an attempt failed here. ``peer``: the member that could not be reached, "" when unknown."""

    fragment: int
    attempt: int
    reason: str
    peer: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The heartbeat. ``values``: the few numbers that a trigger needs."""

    state: str
    inner_step: int
    step_s: float
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Holds:
    """A fetch is complete: the sender now holds this state."""

    position: Position


@dataclass(frozen=True, slots=True)
class Lacks:
    """A fetch failed at every source named; ask for others."""

    fragment: int


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
    roster: tuple[Mark, ...]
    gone: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """``kind``: ``gone`` (come back as a new incarnation) or ``final`` (the user must act)."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """The job has not started, or recovers; ``text`` says what it waits for."""

    text: str


@dataclass(frozen=True, slots=True)
class Start:
    """Cold start: the receiver's own initial state is the committed one."""

    position: Position


@dataclass(frozen=True, slots=True)
class Behind:
    """The receiver lacks this state and is to fetch it. ``heal``: although its version is the same."""

    position: Position
    sources: tuple[str, ...]
    heal: bool


@dataclass(frozen=True, slots=True)
class Roster:
    """Changes of the roster: replicas that are known now, and gone marks (FENCE)."""

    known: tuple[Mark, ...]
    gone: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class CallIn:
    fragment: int
    version: int


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

    ``advance``: inner steps that the commit adds to the committed inner step. ``drop``: gone marks whose COUNT entries
    the commit removes.
    """

    fragment: int
    version: int
    attempt: int
    group: int
    rank: int
    size: int
    total_weight: float
    contributors: int
    advance: int
    joined: tuple[Mark, ...]
    left: tuple[Mark, ...]
    drop: tuple[Mark, ...]


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
class StoreValue:
    """Answer to `StoreGet`; ``value`` is base64."""

    key: str
    value: str


FromReplica = (
    Hello | Propose | Prepared | Failed | Progress | Holds | Lacks | Leaving | Bye | StoreSet | StoreGet
)  # fmt: skip
FromCoordinator = (
    Welcome | Refused | Hold | Start | Behind | Roster | CallIn | TrainOn | Void | Quorum | Abort | Commit | StoreValue
)  # fmt: skip

_TYPES: dict[str, type] = {
    t.__name__: t for t in (*typing.get_args(FromReplica), *typing.get_args(FromCoordinator))
}


def encode(message: FromReplica | FromCoordinator) -> str:
    """The JSON text of a message."""
    return json.dumps(
        {"type": type(message).__name__, **_plain(message)}, separators=(",", ":"), allow_nan=False
    )


def decode(text: str) -> FromReplica | FromCoordinator:
    """The message in ``text``.

    Raises:
        MessageError: it is none; says which field is wrong.
    """
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise MessageError(f"a message is a JSON object, got {type(data).__name__}")
    kind = data.pop("type", None)
    cls = _TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MessageError(f"unknown message type {kind!r:.80}")
    return typing.cast("FromReplica | FromCoordinator", _build(cls, data, cls.__name__))


def from_plain(cls: type[T], data: Any) -> T:
    """An instance of a message part (`Contribution`, ...) from its JSON value; raises `MessageError`."""
    return typing.cast(T, _build(cls, data, cls.__name__))


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


@cache
def _hints(cls: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(cls)
    return {f.name: (hints[f.name], f.default is f.default_factory) for f in fields(cls)}


def _build(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise MessageError(f"{where}: an object is needed, got {type(value).__name__}")
        hints = _hints(kind)
        if extra := sorted(map(str, value.keys() - hints.keys())):
            raise MessageError(f"{where}: unknown field {extra[0]!r:.80}")
        if missing := sorted(name for name, (_, needed) in hints.items() if needed and name not in value):
            raise MessageError(f"{where}: field {missing[0]!r} is missing")
        return kind(**{name: _build(hints[name][0], v, f"{where}.{name}") for name, v in value.items()})
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise MessageError(f"{where}: a list is needed, got {type(value).__name__}")
        if args[-1] is Ellipsis:
            return tuple(_build(args[0], v, where) for v in value)
        if len(value) != len(args):
            raise MessageError(f"{where}: {len(args)} values are needed, got {len(value)}")
        return tuple(_build(a, v, where) for a, v in zip(args, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise MessageError(f"{where}: an object is needed, got {type(value).__name__}")
        return {_build(args[0], k, where): _build(args[1], v, f"{where}.{k:.80}") for k, v in value.items()}
    if origin is types.UnionType or origin is typing.Union:
        for option in args:
            try:
                return _build(option, value, where)
            except MessageError:
                continue
        raise MessageError(
            f"{where}: one of {', '.join(map(_name, args))} is needed, got {type(value).__name__}"
        )
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise MessageError(f"{where}: a number too large") from None
    if kind is type(None) and value is None:
        return None
    if type(value) is not kind:
        raise MessageError(f"{where}: {_name(kind)} is needed, got {type(value).__name__}")
    if kind is float and not math.isfinite(value):
        raise MessageError(f"{where}: a finite number is needed")
    return value


def _name(kind: Any) -> str:
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))
