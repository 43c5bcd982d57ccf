"""The messages of the outer-sync protocol: plain frozen dataclasses, and their JSON form with exact errors.

``docs/protocol.md`` says what each one means and when it is sent. The JSON form of a message is an object with its
field names and ``type``: the class name. Unknown types, missing, extra and ill-typed fields are refused with a
`MessageError` that names them; nothing but JSON is ever parsed.
"""

from __future__ import annotations

import json
import typing
from typing import Any

from ftopt.sync.protocol.to_coordinator import *  # noqa: F403
from ftopt.sync.protocol.to_coordinator import FromReplica
from ftopt.sync.protocol.to_replica import *  # noqa: F403
from ftopt.sync.protocol.to_replica import FromCoordinator
from ftopt.sync.protocol.values import *  # noqa: F403
from ftopt.sync.protocol.wire import MessageError as MessageError
from ftopt.sync.protocol.wire import build_value, parse, shallow

PROTOCOL = 3
"""Version of this protocol, and of what members send each other in a reduction. A replica and a coordinator with
different ones refuse each other."""

T = typing.TypeVar("T")

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
