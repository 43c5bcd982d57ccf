"""The messages of the outer-sync protocol: plain frozen dataclasses, and their JSON form with exact errors.

Each class says what it means, ``docs/protocol.md`` when it is sent. The JSON form of a message is an object with
``type``, the class name, and its fields, except those that have their defaults. Unknown types, missing, extra and
ill-typed fields are refused with a `MessageError` that names them; nothing but JSON is ever parsed.
"""

from __future__ import annotations

import json
import typing
from typing import Any

from ftopt.sync.protocol import limits
from ftopt.sync.protocol.limits import within
from ftopt.sync.protocol.to_coordinator import *  # noqa: F403
from ftopt.sync.protocol.to_coordinator import FromReplica, Hello, Propose
from ftopt.sync.protocol.to_replica import *  # noqa: F403
from ftopt.sync.protocol.to_replica import FromCoordinator
from ftopt.sync.protocol.values import *  # noqa: F403
from ftopt.sync.protocol.values import Contribution
from ftopt.sync.protocol.wire import MessageError as MessageError
from ftopt.sync.protocol.wire import from_plain, given, parse

PROTOCOL = 16
"""Version of this protocol, and of the data that members exchange in a reduction. A replica and a coordinator with
different versions refuse each other."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=given)
_TEXTS = {"reason", "text"}
"""Fields of messages with text for people."""
_TYPES: dict[str, type[FromReplica | FromCoordinator]] = {
    t.__name__: t for t in (*typing.get_args(FromReplica), *typing.get_args(FromCoordinator))
}


def encode(message: FromReplica | FromCoordinator) -> str:
    return _ENCODER.encode({"type": type(message).__name__, **given(message)})


def decode(text: str) -> FromReplica | FromCoordinator:
    """The message in ``text``.

    Raises:
        MessageError: it is no message; the error says which field is wrong.
    """
    data = parse(text)
    if not isinstance(data, dict):
        raise MessageError(f"a message is a JSON object, got {type(data).__name__}")
    kind = data.pop("type", None)
    cls = _TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MessageError(f"unknown message type {kind!r:.80}")
    for name in _TEXTS & data.keys():
        data[name] = _one_line(data[name])
    return from_plain(cls, data)


def _one_line(text: Any) -> Any:
    """Another process' text in a form that is safe to show on a terminal and in a log."""
    if not isinstance(text, str) or text.isprintable():
        return text
    return "".join(x if x.isprintable() else " " if x.isspace() else "?" for x in text)


def from_replica(text: str) -> FromReplica:
    """The message of a stranger in ``text``; also checks that its fields fit each other.

    Raises:
        MessageError: it is no message that a replica may send; the error says what is wrong.
    """
    message = decode(text)
    if not isinstance(message, FromReplica):
        raise MessageError(f"a replica sends no {type(message).__name__}")
    match message:
        case Hello():
            _hello(message)
        case Propose(contribution=contribution):
            _contribution(contribution)
    return message


def protocol_of(text: str) -> tuple[str, int] | None:
    """Replica and protocol of the hello in ``text``, whatever else is in it; None: it is no hello.

    Raises:
        MessageError: it is not JSON.
    """
    data = parse(text)
    if not isinstance(data, dict) or data.get("type") != Hello.__name__:
        return None
    replica, protocol = data.get("replica"), data.get("protocol")
    return (replica, protocol) if isinstance(replica, str) and type(protocol) is int else None


def _hello(hello: Hello) -> None:
    _within("rank", hello.rank, hello.size - 1)
    for what in ("positions", "contributions", "prepared"):
        for part in getattr(hello, what):
            _within(f"{what}.fragment", part.fragment, hello.fragments - 1)
    for contribution in hello.contributions:
        _contribution(contribution)


def _contribution(c: Contribution) -> None:
    _within("steps", c.steps, min(c.last_step, limits.MAX_ADVANCE))
    if c.weight and not (c.finite and c.steps):
        raise MessageError(f"weight: {c.weight:g} for what has no steps or is not finite; 0 is needed")


def _within(what: str, value: int, most: int) -> None:
    if wrong := within(most)(value):
        raise MessageError(f"{what}: {wrong}")
