"""A state as the bytes of a safetensors file that is never written: what the state transfer sends and reads.

``safetensors.torch.save`` would copy every tensor twice, hold the GIL meanwhile, and write the metadata in random
order. Here only the header is built, in sorted order, and the tensors are sent from their own memory: equal states
give bit-equal bytes in every process, and serving costs a training peer no copies. ``load`` would make two more
copies; here received bytes are written straight to their tensors.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ftopt.common.streams import SideStream, reached

_CHUNK_BYTES = 256 << 10
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64",
}  # fmt: skip
STORED = frozenset(_DTYPES)
"""The dtypes that a safetensors file holds."""
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}
_DIMENSIONS = 64
"""The most dimensions that a torch tensor can have."""
_INVALID = "not a valid safetensors file"


class StateImage:
    """One version of one fragment as safetensors bytes: a header, and views of the tensors' memory.

    Args:
        meta: names the state; becomes the header's metadata.
        tensors: must never change from then on. Those on a device or not contiguous are copied.
    """

    def __init__(self, meta: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
        # The widest dtype first, as safetensors does, so that every tensor is aligned; then by name.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, object] = {"__metadata__": dict(sorted(meta.items()))}
        self.meta = dict(meta)
        self._blocks: list[memoryview] = []
        offset = 0
        on_host = _on_host(tensors)
        for name in names:
            tensor = on_host[name]
            block = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
            end, shape = offset + block.nbytes, list(tensor.shape)
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [offset, end]}
            self._blocks.append(block)
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._blocks.insert(0, memoryview(len(text).to_bytes(8, "little") + text))
        self.size = 8 + len(text) + offset
        self.etag = f'"{hashlib.sha256(self._blocks[0]).hexdigest()[:32]}"'
        self.readers = 0
        self.asked_s = 0.0

    def chunks(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes from ``start`` to ``stop`` in pieces of at most 256 KiB, without copies."""
        offset = 0
        for block in self._blocks:
            first, last = max(start - offset, 0), min(stop - offset, block.nbytes)
            for at in range(first, last, _CHUNK_BYTES):
                yield block[at : min(at + _CHUNK_BYTES, last)]
            offset += block.nbytes


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the host; copies from a device run on a side stream, beside its other work."""
    found = dict[str, Tensor]()
    for device in {tensor.device for tensor in tensors.values()}:
        with SideStream().after(reached(device), device):
            found |= {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t.device == device}
    return found


class Arriving:
    """A state being received: bytes are written straight into its tensors, in any order.

    The header comes from a stranger and must be exact: tensors of known dtypes that fill the body without gaps, as
    safetensors requires. No more memory is allocated than the body's size, and each tensor owns its memory.

    Args:
        head: the body's first bytes, the whole header at least.
        size: bytes of the body.

    Raises:
        ValueError: the header is invalid, or there is not enough memory.
    """

    def __init__(self, head: bytes, size: int) -> None:
        begin = 8 + int.from_bytes(head[:8], "little")
        header = _header(head[8:begin])
        meta = header.pop("__metadata__", {})
        if not isinstance(meta, dict):
            raise ValueError("the header has no metadata")
        self.meta = {str(key): str(value) for key, value in meta.items()}
        self.tensors: dict[str, Tensor] = {}
        self._starts: list[int] = []
        self._blocks: list[memoryview] = []
        at = begin
        for (start, stop), name, dtype, shape in _entries(header):
            if start != at - begin or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{_INVALID}: tensor {name!r:.60} does not have the bytes of its shape")
            at = begin + stop
            if at > size:
                break
            try:
                tensor = torch.empty(shape, dtype=dtype)
                block = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
            except (RuntimeError, TypeError, OverflowError) as error:
                reason = f"{error}".partition("\n")[0][:200]
                raise ValueError(f"no tensor can be made of {name!r:.60}: {reason}") from None
            self.tensors[name] = tensor
            if block.nbytes:
                self._starts.append(at - block.nbytes)
                self._blocks.append(block)
        if at != size:
            raise ValueError(f"{_INVALID}: the body has {size} bytes, the header describes another size")
        self.start = begin
        self.write(begin, memoryview(head)[begin:])

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Writes the body's bytes from ``at`` on; these lie after the header, and not beyond the end."""
        data = memoryview(data)
        index = bisect.bisect_right(self._starts, at) - 1
        while data:
            block = self._blocks[index][at - self._starts[index] :]
            count = min(len(block), len(data))
            block[:count] = data[:count]
            at, data, index = at + count, data[count:], index + 1


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("the header is nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError(f"{_INVALID}: the header is not an object")
    return header


def _entries(header: dict[str, Any]) -> list[tuple[tuple[int, int], str, torch.dtype, list[int]]]:
    """Offsets, name, dtype and shape of each tensor, in their order in the body."""
    found = []
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if (
                dtype in _NAMES and len(shape) <= _DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
            ):
                found.append(((start, stop), name, _NAMES[dtype], shape))
            case _:
                raise ValueError(f"{_INVALID}: {name!r:.60} is not a tensor that can be read")
    return sorted(found, key=lambda entry: entry[0])
