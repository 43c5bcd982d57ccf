"""Dataclasses as JSON, and back with exact errors: values that do not fit their types are refused, never guessed."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from ftopt.sync.protocol.limits import MAX_INT

T = typing.TypeVar("T")


class MessageError(ValueError):
    """The text is not a message of this protocol."""


def parse(text: str) -> Any:
    """The JSON value in ``text``; raises `MessageError`."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def given(value: Any) -> dict[str, Any]:
    """A dataclass' fields without those that have their defaults, unconverted: for a `json.JSONEncoder`, which does the
    rest. `from_plain` reads it."""
    cls: Any = type(value)
    return {name: x for name, default in _defaults(cls) if (x := getattr(value, name)) is not default and x != default}


@cache
def _defaults(cls: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, f.default) for f in fields(cls))


def plain(value: Any) -> Any:
    """The JSON value of a dataclass, a tuple or a scalar."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name, _ in _defaults(type(value))}
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return value


def from_plain(cls: type[T], data: Any) -> T:
    """An instance of a dataclass from its JSON value; raises `MessageError` that begins with the class' name."""
    kind: Any = cls
    return typing.cast(T, _builder(kind)(data, cls.__name__))


_Build = Callable[[Any, str], Any]


@cache
def _builder(kind: Any) -> _Build:
    """A function that builds values of one type; the type is inspected once, not with each message."""
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_builder(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _checked_builder(args[0], args[1:])
    if origin is tuple:
        return _list_builder(args[0]) if args[-1] is Ellipsis else _tuple_builder(args)
    if origin is dict:
        return _dict_builder(*args)
    if origin is types.UnionType or origin is typing.Union:
        return _union_builder(args)
    return _scalar_builder(kind)


def _needed(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        name = "a list" if kind is list else "an object"
        raise MessageError(f"{where}: {name} is needed, got {type(value).__name__}")
    return value


def _dataclass_builder(kind: type) -> _Build:
    hints = typing.get_type_hints(kind, include_extras=True)
    builders = {f.name: _builder(hints[f.name]) for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is f.default_factory}

    def one(value: Any, where: str) -> Any:
        _needed(dict, value, where)
        if not value.keys() <= builders.keys():
            raise MessageError(f"{where}: unknown field {min(map(str, value.keys() - builders.keys()))!r:.80}")
        if not needed <= value.keys():
            raise MessageError(f"{where}: field {min(needed - value.keys())!r} is missing")
        parts = {name: builders[name](v, f"{where}.{name}") for name, v in value.items()}
        try:
            return kind(**parts)
        except ValueError as error:  # a part that is invalid by itself
            raise MessageError(f"{where}: {error}") from None

    return one


def _checked_builder(kind: Any, checks: tuple[Callable[[Any], str], ...]) -> _Build:
    build = _builder(kind)

    def one(value: Any, where: str) -> Any:
        built = build(value, where)
        for check in checks:
            if wrong := check(built):
                raise MessageError(f"{where}: {wrong}")
        return built

    return one


def _list_builder(kind: Any) -> _Build:
    item = _builder(kind)
    return lambda value, where: tuple([item(v, where) for v in _needed(list, value, where)])


def _tuple_builder(kinds: tuple[Any, ...]) -> _Build:
    items = [_builder(kind) for kind in kinds]

    def one(value: Any, where: str) -> Any:
        if len(_needed(list, value, where)) != len(items):
            raise MessageError(f"{where}: {len(items)} values are needed, got {len(value)}")
        return tuple([item(v, where) for item, v in zip(items, value, strict=True)])

    return one


def _dict_builder(key_kind: Any, value_kind: Any) -> _Build:
    key, item = _builder(key_kind), _builder(value_kind)
    return lambda value, where: {
        key(k, where): item(v, f"{where}.{k:.80}") for k, v in _needed(dict, value, where).items()
    }


def _union_builder(kinds: tuple[Any, ...]) -> _Build:
    options = [_builder(kind) for kind in kinds]

    def one(value: Any, where: str) -> Any:
        for option in options:
            try:
                return option(value, where)
            except MessageError:
                continue
        raise MessageError(f"{where}: one of {', '.join(map(_name, kinds))} is needed, got {type(value).__name__}")

    return one


def _scalar_builder(kind: Any) -> _Build:
    def one(value: Any, where: str) -> Any:
        if kind is float and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                raise MessageError(f"{where}: a number too large") from None
        if type(value) is not kind:
            raise MessageError(f"{where}: {_name(kind)} is needed, got {type(value).__name__}")
        if kind is float and not math.isfinite(value):
            raise MessageError(f"{where}: a finite number is needed")
        if kind is int and abs(value) > MAX_INT:
            raise MessageError(f"{where}: a number too large")
        if kind is str and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise MessageError(f"{where}: half a character")
        return value

    return one


def _name(kind: Any) -> str:
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))
