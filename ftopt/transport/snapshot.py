"""A state as the bytes of a safetensors file that is never written: what the state transfer sends and reads.

``safetensors.torch.save`` would copy every tensor twice, hold the interpreter's lock meanwhile, and write the
metadata in random order. Here only the header is made, in sorted order, and the tensors are sent from where
they lie: equal states give bit-equal bytes in every process, and a training peer pays for nothing but the
sending. Reading is safetensors' own: it checks the header, the offsets and the length.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor

Meta = dict[str, str]

_CHUNK_BYTES = 256 << 10
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Snapshot:
    """One version of one fragment as safetensors bytes: a header, and views of the tensors' memory.

    Args:
        meta: names the state; becomes the header's metadata.
        tensors: never changed from then on. What is on a device or not contiguous is copied.
    """

    def __init__(self, meta: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
        # The widest dtype first, as safetensors does, so that every tensor is aligned; then by name.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, object] = {"__metadata__": dict(sorted(meta.items()))}
        self.meta = dict(meta)
        self._blocks: list[memoryview] = []
        offset = 0
        for name in names:
            tensor = tensors[name].detach().cpu().contiguous()
            block = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
            end = offset + block.nbytes
            shape = list(tensor.shape)
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
        """The bytes from ``start`` to ``stop`` in pieces of at most 256 KiB, none of them copied."""
        offset = 0
        for block in self._blocks:
            first, last = max(start - offset, 0), min(stop - offset, block.nbytes)
            for at in range(first, last, _CHUNK_BYTES):
                yield block[at : min(at + _CHUNK_BYTES, last)]
            offset += block.nbytes


def meta_of(data: bytes) -> Meta:
    """The metadata of a safetensors body, of which ``data`` holds the header at least.

    Raises:
        ValueError: it is no such header.
    """
    stop = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:stop])
    except RecursionError:
        raise ValueError("the header is nested too deep") from None
    meta = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(meta, dict):
        raise ValueError("the header has no metadata")
    return {str(key): str(value) for key, value in meta.items()}


def decode(parts: Sequence[bytes]) -> tuple[Meta, dict[str, Tensor]]:
    """Metadata and tensors of a whole body in ``parts``; the tensors own their memory.

    Raises:
        ValueError: it is no valid safetensors.
    """
    data = b"".join(parts)
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # besides SafetensorError whatever a stranger's dtypes and shapes bring about in torch
        raise ValueError(f"no valid safetensors: {type(error).__name__}: {error}") from error
    return meta_of(data), tensors
