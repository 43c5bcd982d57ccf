"""Dataclasses as JSON, and back with exact errors: whatever does not fit its type is refused; nothing is guessed."""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from ftopt.sync.protocol.limits import MAX_INT


class MessageError(ValueError):
    """The text is not a message of this protocol."""


def parse(text: str) -> Any:
    """The JSON value in ``text``; raises `MessageError`."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def plain(value: Any) -> Any:
    """The JSON value of a dataclass, a tuple or a scalar."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return value


@cache
def _hints(cls: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(cls)
    return {f.name: (hints[f.name], f.default is f.default_factory) for f in fields(cls)}


def build(kind: Any, value: Any, where: str) -> Any:
    """A value of type ``kind`` from its JSON value; raises `MessageError` that begins with ``where``."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise MessageError(f"{where}: an object is needed, got {type(value).__name__}")
        hints = _hints(kind)
        if extra := sorted(map(str, value.keys() - hints.keys())):
            raise MessageError(f"{where}: unknown field {extra[0]!r:.80}")
        if missing := sorted(name for name, (_, needed) in hints.items() if needed and name not in value):
            raise MessageError(f"{where}: field {missing[0]!r} is missing")
        parts = {name: build(hints[name][0], v, f"{where}.{name}") for name, v in value.items()}
        try:
            return kind(**parts)
        except ValueError as error:  # a part that makes no sense by itself
            raise MessageError(f"{where}: {error}") from None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise MessageError(f"{where}: a list is needed, got {type(value).__name__}")
        if args[-1] is Ellipsis:
            return tuple(build(args[0], v, where) for v in value)
        if len(value) != len(args):
            raise MessageError(f"{where}: {len(args)} values are needed, got {len(value)}")
        return tuple(build(a, v, where) for a, v in zip(args, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise MessageError(f"{where}: an object is needed, got {type(value).__name__}")
        return {build(args[0], k, where): build(args[1], v, f"{where}.{k:.80}") for k, v in value.items()}
    if origin is types.UnionType or origin is typing.Union:
        for option in args:
            try:
                return build(option, value, where)
            except MessageError:
                continue
        raise MessageError(f"{where}: one of {', '.join(map(_name, args))} is needed, got {type(value).__name__}")
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
    if kind is int and abs(value) > MAX_INT:
        raise MessageError(f"{where}: a number too large")
    if kind is str and not _whole(value):
        raise MessageError(f"{where}: half a character")
    return value


def _whole(text: str) -> bool:
    """Whether ``text`` can be hashed and stored: JSON may escape half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name(kind: Any) -> str:
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))
