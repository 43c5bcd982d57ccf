"""The types of values that a tree may hold besides tensors and JSON's own, and how each is split and rebuilt.

Nothing that a checkpoint names is imported or called: a class of the user's (an enum, a named tuple, a dataclass) is
looked up in the loaded modules, and its objects are created without its ``__init__``.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import enum
import io
import pathlib
import sys
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import torch


def _no_head(value: Any) -> list[Any]:
    return []


@dataclasses.dataclass(frozen=True)
class Kind:
    """Values of one type.

    Args:
        name: of the kind, in a checkpoint.
        make: creates the value from its head and its items.
        head: plain values that describe it.
        items: its contents, a list or a dict; None: the head describes all of it.
        ordered: whether its items have an order.
    """

    name: str
    make: Callable[[list[Any], Any], Any]
    head: Callable[[Any], list[Any]] = _no_head
    items: Callable[[Any], list[Any] | dict[Any, Any]] | None = None
    ordered: bool = True


def kind_of(value: Any) -> Kind | None:
    """The kind of a value that is no tensor; None if a tree cannot hold it."""
    found = _BY_TYPE.get(type(value))
    if found is _DEFAULTDICT and value.default_factory not in _FACTORIES.values():
        return None
    if found is not None:
        return found
    numpy = sys.modules.get("numpy")
    if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        dtype = value.dtype
        plain = dtype.kind in "iufcbMmUS" or (dtype.names is not None and not dtype.hasobject)
        return (KINDS["array"] if type(value) is numpy.ndarray else KINDS["number"]) if plain else None
    if not _is_loaded(type(value)):
        return None
    if isinstance(value, enum.Enum):
        return KINDS["enum"]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return KINDS["namedtuple"]
    if dataclasses.is_dataclass(value) and set(getattr(value, "__dict__", ())) <= {
        field.name for field in dataclasses.fields(value)
    }:
        return KINDS["dataclass"]
    return None


def loaded(module: str, name: str) -> Any:
    """The class of that name in a loaded module. ValueError: there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise ValueError(f"there is no class {module}.{name} here; import it before the checkpoint is read")
    return found


def class_of(value: object) -> list[str]:
    """Module and name by which `loaded` finds the class of a value."""
    return [type(value).__module__, type(value).__qualname__]


def _is_loaded(cls: type) -> bool:
    try:
        return loaded(cls.__module__, cls.__qualname__) is cls
    except ValueError:
        return False


def _class(head: list[Any], fits: Callable[[type], bool]) -> Any:
    cls = loaded(*head[:2])
    if not fits(cls):
        raise ValueError(f"{head[0]}.{head[1]} is another class than it was")
    return cls


def _enum(head: list[Any], items: None) -> Any:
    cls = _class(head, lambda cls: issubclass(cls, enum.Enum))
    return cls(head[2]) if issubclass(cls, enum.Flag) else cls[head[2]]


def _namedtuple(head: list[Any], items: list[Any]) -> Any:
    cls = _class(head, lambda cls: issubclass(cls, tuple) and len(getattr(cls, "_fields", ())) == len(items))
    return tuple.__new__(cls, items)


def _dataclass(head: list[Any], items: dict[str, Any]) -> Any:
    names = set(items)
    cls = _class(head, lambda cls: dataclasses.is_dataclass(cls) and names <= {f.name for f in dataclasses.fields(cls)})
    made = object.__new__(cls)
    for name, value in items.items():
        object.__setattr__(made, name, value)
    return made


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}


_FACTORIES: Mapping[str, Any] = {
    each.__name__: each
    for each in (int, float, complex, bool, str, bytes, list, tuple, dict, set, Counter, OrderedDict, deque)
} | {"": None}


def _factory(value: defaultdict[Any, Any]) -> list[Any]:
    return [name for name, each in _FACTORIES.items() if each is value.default_factory]


def _ordered(head: list[Any], items: dict[Any, Any]) -> OrderedDict[Any, Any]:
    made = OrderedDict(items)
    vars(made).update(head[0] or {})  # a module's state dict keeps the versions of its modules there
    return made


def _from_moment(cls: Any, head: list[Any], items: None) -> Any:
    return cls.fromisoformat(head[0]).replace(tzinfo=head[1], fold=head[2])


def _moment(value: datetime.datetime | datetime.time) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.tzinfo, value.fold]


def _constant(head: list[Any], items: None) -> Any:
    found = getattr(torch, head[0])
    if not isinstance(found, _CONSTANTS):
        raise ValueError(f"{head[0]!r:.40} is no dtype, layout or memory format")
    return found


_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def _generator(head: list[Any], items: None) -> torch.Generator:
    made = torch.Generator(head[0])
    made.set_state(head[1])
    return made


def _npy(value: Any) -> list[Any]:
    import numpy
    from numpy.lib.format import write_array

    file = io.BytesIO()
    write_array(file, numpy.asarray(value), allow_pickle=False)
    return _base64(file.getvalue())


def _array(head: list[Any], items: None = None) -> Any:
    from numpy.lib.format import read_array

    return read_array(io.BytesIO(_bytes(head)), allow_pickle=False)


def _base64(value: bytes | bytearray) -> list[Any]:
    return [base64.b64encode(value).decode()]


def _bytes(head: list[Any], items: None = None) -> bytes:
    return base64.b64decode(head[0], validate=True)


def _words(value: object) -> list[Any]:
    return [str(value)]


_DEFAULTDICT = Kind("defaultdict", lambda head, items: defaultdict(_FACTORIES[head[0]], items), _factory, dict)
_BY_TYPE: dict[type, Kind] = {
    list: Kind("list", lambda head, items: items, items=list),
    tuple: Kind("tuple", lambda head, items: tuple(items), items=list),
    dict: Kind("dict", lambda head, items: items, items=dict),
    OrderedDict: Kind("ordered", _ordered, lambda value: [vars(value) or None], dict),
    defaultdict: _DEFAULTDICT,
    Counter: Kind("counter", lambda head, items: Counter(items), items=dict),
    deque: Kind("deque", lambda head, items: deque(items, head[0]), lambda value: [value.maxlen], list),
    set: Kind("set", lambda head, items: set(items), items=list, ordered=False),
    frozenset: Kind("frozenset", lambda head, items: frozenset(items), items=list, ordered=False),
    types.SimpleNamespace: Kind("namespace", lambda head, items: types.SimpleNamespace(**items), items=vars),
    float: Kind("float", lambda head, items: float(head[0]), lambda value: [repr(value)]),
    int: Kind("int", lambda head, items: int(head[0], 16), lambda value: [hex(value)]),
    complex: Kind("complex", lambda head, items: complex(*head), lambda value: [value.real, value.imag]),
    bytes: Kind("bytes", _bytes, _base64),
    bytearray: Kind("bytearray", lambda head, items: bytearray(_bytes(head)), _base64),
    io.BytesIO: Kind("bytesio", lambda head, items: io.BytesIO(_bytes(head)), lambda v: _base64(v.getvalue())),
    range: Kind("range", lambda head, items: range(*head), lambda value: [value.start, value.stop, value.step]),
    slice: Kind("slice", lambda head, items: slice(*head), lambda value: [value.start, value.stop, value.step]),
    Decimal: Kind("decimal", lambda head, items: Decimal(head[0]), _words),
    Fraction: Kind("fraction", lambda h, items: Fraction(*h), lambda value: [value.numerator, value.denominator]),
    uuid.UUID: Kind("uuid", lambda head, items: uuid.UUID(head[0]), _words),
    datetime.datetime: Kind("datetime", partial(_from_moment, datetime.datetime), _moment),
    datetime.time: Kind("time", partial(_from_moment, datetime.time), _moment),
    datetime.date: Kind("date", lambda head, items: datetime.date.fromisoformat(head[0]), lambda v: [v.isoformat()]),
    datetime.timedelta: Kind(
        "timedelta", lambda head, items: datetime.timedelta(*head), lambda v: [v.days, v.seconds, v.microseconds]
    ),
    datetime.timezone: Kind("timezone", lambda h, items: datetime.timezone(*h), lambda v: [*v.__getinitargs__()]),
    zoneinfo.ZoneInfo: Kind("zone", lambda head, items: zoneinfo.ZoneInfo(head[0]), lambda value: [value.key]),
    pathlib.PurePosixPath: Kind("posix", lambda head, items: pathlib.PurePosixPath(head[0]), _words),
    pathlib.PureWindowsPath: Kind("windows", lambda head, items: pathlib.PureWindowsPath(head[0]), _words),
    type(pathlib.Path()): Kind("path", lambda head, items: pathlib.Path(head[0]), _words),
    torch.Size: Kind("size", lambda head, items: torch.Size(head), list),
    torch.device: Kind("device", lambda head, items: torch.device(head[0]), _words),
    torch.Generator: Kind("generator", _generator, lambda v: [str(v.device), v.get_state()]),
} | {each: Kind("constant", _constant, lambda value: [str(value).removeprefix("torch.")]) for each in _CONSTANTS}
KINDS: dict[str, Kind] = {kind.name: kind for kind in _BY_TYPE.values()} | {
    kind.name: kind
    for kind in (
        Kind("array", _array, _npy),
        Kind("number", lambda head, items: _array(head)[()], _npy),
        Kind("enum", _enum, lambda v: [*class_of(v), v.value if isinstance(v, enum.Flag) else v.name]),
        Kind("namedtuple", _namedtuple, class_of, list),
        Kind("dataclass", _dataclass, class_of, _fields),
    )
}
"""All kinds, by name."""
