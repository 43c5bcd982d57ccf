"""Nested state as JSON and named tensors, for peers: numbers, lists, dicts and tensors come back as they were."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ftopt.common.tree import flatten, unflatten
from ftopt.errors import UserError
from ftopt.step.tensors.flat import local

_RAW, _NUMPY = "ftopt.raw", "ftopt.numpy"
"""Keys that mark a tensor of another dtype, packed as bytes, and a NumPy scalar."""
_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The JSON of a value; its tensors go into ``tensors``, by reference. UserError: it holds a value of another
    kind."""
    return flatten(_out(value, where), tensors, where)


def pack_pairs(items: Iterable[tuple[Any, Any]], tensors: dict[str, Tensor], where: str) -> list[list[Any]]:
    """The JSON of a dict with keys of any kind, in order."""
    return [[pack(key, tensors, where), pack(value, tensors, where + str(key))] for key, value in items]


def unpack(packed: Any, tensors: Mapping[str, Tensor], place: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
    """Reverses `pack`; each tensor is a copy that ``place`` has put on its device. ValueError or KeyError: it is not a
    result of `pack`."""
    return _in(unflatten(packed, tensors), place)


def as_tensor(value: Any) -> Tensor:
    """JSON as a tensor of bytes, to send with tensors."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def of_tensor(tensor: Tensor) -> Any:
    """Reverses `as_tensor`. ValueError: it is not JSON."""
    return json.loads(bytes(tensor.cpu().tolist()))


def marks(group: Mapping[str, Any]) -> dict[str, Any]:
    """Marks that change when a value of a parameter group is written, also in place. No tensor is copied."""
    return {key: _mark(value) for key, value in group.items() if key != "params"}


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys under which `marks` differ."""
    found = []
    for key, value in now.items():
        try:
            same = key in before and bool([before[key]] == [value])
        except Exception:  # an object that cannot be compared is taken for a setting
            same = True
        if not same:
            found.append(key)
    return found


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, Mapping):
        return [(key, _mark(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_mark(item) for item in value]
    numpy = sys.modules.get("numpy")
    return value.tobytes() if numpy is not None and isinstance(value, numpy.ndarray) else value


def _out(value: Any, where: str) -> Any:
    if isinstance(value, Tensor):
        tensor = local(value)
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype in _DTYPES or tensor.layout != torch.strided:
            return tensor
        try:
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        except RuntimeError as error:
            raise UserError(f"{where} is a tensor of {tensor.dtype} ({error})") from None
        return {_RAW: [str(tensor.dtype), list(tensor.shape)], "data": raw}
    if isinstance(value, Mapping):
        return {key: _out(item, f"{where}.{key}") for key, item in value.items()}
    if type(value) is tuple:
        return tuple(_out(item, where) for item in value)
    if isinstance(value, list):
        return [_out(item, where) for item in value]
    numpy = sys.modules.get("numpy")
    return {_NUMPY: numpy.asarray(value)} if numpy is not None and isinstance(value, numpy.generic) else value


def _in(value: Any, place: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return place(value.clone())
    if isinstance(value, tuple | list):
        return type(value)(_in(item, place) for item in value)
    if not isinstance(value, dict):
        return value
    if _RAW in value:
        dtype, shape = value[_RAW]
        return place(value["data"].clone().view(getattr(torch, dtype.removeprefix("torch."))).view(shape))
    if _NUMPY in value:
        return value[_NUMPY][()]
    return {key: _in(item, place) for key, item in value.items()}
