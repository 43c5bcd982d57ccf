"""Nested values as JSON plus tensors, and back: exact in every bit, each value with its original type, and without
running code.

A value that JSON lacks is an object with one key that begins with ``$``: ``{"$KIND": [head, items]}``, with the kinds
of `ftopt.common.tree_kinds`. A tensor is ``{"$tensor": name}``; its name is the path to it. A tensor that a file of
plain tensors cannot hold (float8, complex, sparse) is split into tensors that it can hold.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ftopt.common.tree_kinds import KINDS, class_of, kind_of, loaded
from ftopt.errors import UserError

_Types = type | tuple[type, ...]
Tree = dict[str, Any]
"""Nested dicts, lists and tuples of numbers, strings, None and tensors."""

PLAIN = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
})  # fmt: skip
"""The dtypes of plain tensors."""
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_SHELL = re.compile("u?int[1-7]")
"""Dtypes that torch names, but whose tensors it cannot even copy."""
_INT_BITS = 1024
"""Longer integers are written in hexadecimal: Python limits the digits of decimal ones."""


def flatten(value: Any, tensors: dict[str, Tensor], where: str = "") -> Any:
    """Returns the JSON value; puts tensors into ``tensors``, by reference. UserError: a value of another type; the
    message says where it is."""
    try:
        return _flatten(value, tensors, where)
    except RecursionError:
        raise _endless(where) from None


def refusal(value: Any, where: str = "") -> str:
    """Why `flatten` refuses a value; "" if it does not."""
    try:
        flatten(value, {}, where)
    except UserError as error:
        return str(error)
    return ""


def _flatten(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    if value is None or type(value) in (bool, str) or (type(value) is int and value.bit_length() <= _INT_BITS):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, Tensor):
        return _of_tensor(value, tensors, where)
    kind = kind_of(value)
    if kind is None:
        raise UserError(
            f"{where} is a {_class_name(value)}, which a checkpoint cannot hold; "
            "allowed: numbers, strings, bytes, None, dates, paths, enums, tensors, NumPy arrays and numbers, and "
            "lists, tuples, sets, dicts, named tuples and dataclasses of them"
        )
    head = [_flatten(each, tensors, where) for each in kind.head(value)]
    items: Any = None if kind.items is None else kind.items(value)
    if isinstance(items, dict):
        plain = kind.name == "dict" and all(type(key) is str and not key.startswith("$") for key in items)
        pairs = [[_flatten(k, tensors, where), _flatten(v, tensors, _join(where, k))] for k, v in items.items()]
        return dict(pairs) if plain else {f"${kind.name}": [head, pairs]}
    if items is not None:
        items = [_flatten(item, tensors, _join(where, index)) for index, item in enumerate(items)]
    if not kind.ordered:
        items.sort(key=json.dumps)
    return items if kind.name == "list" else {f"${kind.name}": [head, items]}


def _of_tensor(value: Tensor, tensors: dict[str, Tensor], where: str) -> Any:
    def part(tensor: Tensor, name: str) -> Any:
        return _of_tensor(tensor, tensors, _join(where, name))

    if isinstance(value, nn.Parameter) and type(value) is nn.Parameter:
        return {"$parameter": [_of_tensor(value.detach(), tensors, where), value.requires_grad]}
    value = value.detach()
    kind = type(value)
    if value.device.type == "meta" or value.is_nested or value.is_quantized:
        raise _no_place(value, where)
    if kind is not Tensor:
        if not hasattr(value, "__tensor_flatten__") or loaded(*class_of(value)) is not kind:
            raise _no_place(value, where)
        names, context = value.__tensor_flatten__()
        inner = {name: part(getattr(value, name), name) for name in names}
        return {"$subclass": [class_of(value), inner, _flatten(context, tensors, where), _form(value)]}
    if value.layout == torch.sparse_coo:
        inner = {"indices": part(value._indices(), "indices"), "values": part(value._values(), "values")}
        return {"$sparse": [list(value.shape), inner, value.is_coalesced()]}
    if value.layout in _COMPRESSED:
        rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
        outer, within = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
        inner = {name: part(getattr(value, name)(), name) for name in (outer, within, "values")}
        return {"$compressed": [list(value.shape), inner, str(value.layout).removeprefix("torch.")]}
    if value.layout != torch.strided:
        raise _no_place(value, where)
    if value.dtype in PLAIN:
        name, number = where, 0
        while name in tensors:  # {"a": {"b": x}, "a.b": y}, {1: x, "1": y}
            name, number = f"{where}#{number}", number + 1
        tensors[name] = value.resolve_neg()
        return {"$tensor": name}
    dtype = str(value.dtype).removeprefix("torch.")
    if _SHELL.fullmatch(dtype):
        raise _no_place(value, where)
    bits = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return {"$bits": [dtype, list(value.shape), part(bits, "bits")]}


def _no_place(value: Tensor, where: str) -> UserError:
    form = "meta" if value.device.type == "meta" else "nested" if value.is_nested else ""
    form = form or ("quantized" if value.is_quantized else str(value.layout).removeprefix("torch."))
    name = "tensor" if type(value) is Tensor else _class_name(value)
    return UserError(f"{where} is a {form} {name} of {value.dtype}, which a checkpoint cannot hold")


def _form(value: Tensor) -> list[list[int]]:
    return [list(value.shape), list(value.stride()) if value.layout == torch.strided else []]


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Reverses `flatten`. ValueError: ``value`` is not a result of `flatten`."""
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value), "")
    if len(value) != 1 or not name.startswith("$"):
        return {key: unflatten(item, tensors) for key, item in value.items()}
    body, make = value[name], _TENSORS.get(name[1:])
    if make is None and name[1:] not in KINDS:
        raise ValueError(f"unknown kind {name!r:.40}")
    try:
        return _made(name[1:], body, tensors) if make is None else make(body, tensors)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"no {name[1:]}: {error}") from None
    except Exception as error:  # whatever creates the value may raise: the file is not ours
        raise ValueError(f"no {name[1:]}: {type(error).__name__}: {error}") from None


def _made(name: str, body: Any, tensors: Mapping[str, Tensor]) -> Any:
    kind = KINDS[name]
    head, items = unflatten(body[0], tensors), unflatten(body[1], tensors)
    return kind.make(head, dict(items) if kind.items in _MAPPINGS and items is not None else items)


_MAPPINGS = {KINDS[name].items for name in ("dict", "namespace", "dataclass")}


def _bits(body: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    dtype = getattr(torch, body[0])
    return unflatten(body[2], tensors).clone().view(dtype).reshape(body[1])  # type: ignore[no-any-return]


def _sparse(body: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    inner = unflatten(body[1], tensors)
    return torch.sparse_coo_tensor(
        inner["indices"], inner["values"], body[0], is_coalesced=body[2], check_invariants=True
    )


def _compressed(body: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    layout = getattr(torch, body[2])
    outer, within, values = unflatten(body[1], tensors).values()
    size = torch.Size(body[0])
    return torch.sparse_compressed_tensor(outer, within, values, size, layout=layout, check_invariants=True)


def _subclass(body: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    cls: Any = loaded(*body[0])
    if not issubclass(cls, Tensor):
        raise ValueError(f"{cls} is no class of tensors")
    inner, context = unflatten(body[1], tensors), unflatten(body[2], tensors)
    made: Tensor = cls.__tensor_unflatten__(inner, context, torch.Size(body[3][0]), tuple(body[3][1]))
    return made


_TENSORS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "tensor": lambda body, tensors: tensors[body],
    "parameter": lambda body, tensors: nn.Parameter(unflatten(body[0], tensors), requires_grad=body[1]),
    "bits": _bits,
    "sparse": _sparse,
    "compressed": _compressed,
    "subclass": _subclass,
}


def rebuilt(value: Any, leaf: Callable[[Any, str], Any], where: str = "", *, leaves: _Types = Tensor) -> Any:
    """The same nested value with new containers, which training does not change, and ``leaf(item, where)`` in place of
    each tensor, or of each instance of ``leaves`` if given. Values that a tree cannot hold stay unchanged.

    Raises:
        UserError: the value contains itself.
    """
    try:
        return _rebuilt(value, leaf, where, leaves)
    except RecursionError:
        raise _endless(where) from None


def _rebuilt(value: Any, leaf: Callable[[Any, str], Any], where: str, leaves: _Types) -> Any:
    if isinstance(value, leaves):
        return leaf(value, where)
    if value is None or isinstance(value, bool | int | float | str | Tensor) or (kind := kind_of(value)) is None:
        return value
    if kind.items is None:
        return copy.deepcopy(value)
    items: Any = kind.items(value)
    if isinstance(items, dict):
        items = {key: _rebuilt(item, leaf, _join(where, key), leaves) for key, item in items.items()}
    else:
        items = [_rebuilt(item, leaf, _join(where, index), leaves) for index, item in enumerate(items)]
    return kind.make([_rebuilt(each, leaf, where, leaves) for each in kind.head(value)], items)


def _class_name(value: object) -> str:
    return ".".join(class_of(value)).removeprefix("builtins.")


def _endless(where: str) -> UserError:
    return UserError(f"{where} contains itself, or is nested too deep, which a checkpoint cannot hold")


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)
