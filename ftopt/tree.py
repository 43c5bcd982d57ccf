"""Nested values as JSON plus tensors, and back: exact in every bit, tuples as tuples, and without running code.

Types that JSON lacks are objects with one key that begins with ``$``. A tensor is ``{"$tensor": name}``; its name is
the path to it.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ftopt.errors import UserError

Tree = dict[str, Any]
"""Nested dicts, lists and tuples of numbers, strings, None and tensors."""

_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


def flatten(value: Any, tensors: dict[str, Tensor], where: str = "") -> Any:
    """Returns the JSON value; puts tensors into ``tensors``, by reference.

    Raises:
        UserError: a value of another type; the message says where it is.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        if value.dtype not in _DTYPES or value.layout != torch.strided:
            raise UserError(f"{where} is a {value.layout} tensor of {value.dtype}, which a checkpoint cannot hold")
        tensors[where] = value.detach()
        return {"$tensor": where}
    if isinstance(value, list):
        return [flatten(item, tensors, _join(where, index)) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": flatten(list(value), tensors, where)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: flatten(item, tensors, _join(where, key)) for key, item in value.items()}
        items = [[flatten(k, tensors, where), flatten(v, tensors, _join(where, k))] for k, v in value.items()]
        return {"$dict": items}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "iufb":
        return {"$array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    raise UserError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; allowed: numbers, strings, bytes, None, "
        "tensors, NumPy arrays, and lists, tuples and dicts of them"
    )


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Reverses `flatten`.

    Raises:
        ValueError: ``value`` is not a result of `flatten`.
    """
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if len(value) != 1 or not key.startswith("$"):
        return {name: unflatten(item, tensors) for name, item in value.items()}
    body = value[key]
    try:
        match key:
            case "$float":
                return float(body)
            case "$tensor":
                return tensors[body]
            case "$tuple":
                return tuple(unflatten(body, tensors))
            case "$dict":
                return {unflatten(k, tensors): unflatten(v, tensors) for k, v in body}
            case "$bytes":
                return base64.b64decode(body, validate=True)
            case "$array":
                import numpy

                dtype, shape, raw = body
                return numpy.frombuffer(base64.b64decode(raw, validate=True), dtype).reshape(shape).copy()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no {key[1:]}: {error}") from None
    raise ValueError(f"unknown kind {key!r:.40}")


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)
