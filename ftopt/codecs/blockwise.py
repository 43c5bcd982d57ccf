"""Base of the lossy codecs: it treats a payload as rows, one per block, and works on parts that fit in the cache."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from ftopt.common.later import torch

if TYPE_CHECKING:
    from torch import Tensor

_PART, _PART_ELSEWHERE = 1 << 18, 1 << 24
"""Elements processed at a time. On a CPU 1 MiB of fp32: with fewer, calls dominate; more do not fit in the cache."""


def bytes_as(dtype: torch.dtype, encoded: Tensor) -> Tensor:
    """``encoded`` (uint8) read as ``dtype``, little endian; in place if the bytes are aligned."""
    found = in_place(dtype, encoded)
    return encoded.clone(memory_format=torch.contiguous_format).view(dtype) if found is None else found


def in_place(dtype: torch.dtype, encoded: Tensor) -> Tensor | None:
    """A view of the same memory (uint8) as ``dtype``, to read or to write; None if it is not aligned."""
    places = (encoded.storage_offset(), *encoded.stride()[:-1], encoded.shape[-1])
    fits = encoded.stride(-1) == 1 and all(place % dtype.itemsize == 0 for place in places)
    return encoded.view(dtype) if fits else None


class Blockwise(ABC):
    """A codec that encodes rows of `block` values, each row by itself."""

    block: ClassVar[int] = 256
    exact: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    def for_sum(self, payloads: int) -> Blockwise:
        return self

    @abstractmethod
    def row_bytes(self, values: int) -> int:
        """Bytes for a block of ``values`` values, 1 to `block`."""

    @abstractmethod
    def encode_rows(self, rows: Tensor, out: Tensor) -> float:
        """Encodes ``rows`` (fp32, [r, n]) into ``out`` (uint8, [r, row_bytes(n)], rows contiguous).

        Returns:
            A number that is NaN or infinite if any of the values is.
        """

    @abstractmethod
    def decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        """Decodes ``encoded`` (uint8, [r, row_bytes(n)]) into ``out`` (fp32, [r, n])."""

    def leave_rows(self, rows: Tensor, encoded: Tensor, left: Tensor) -> None:
        """``left <- rows - decoded``, in fp32."""
        self.decode_rows(encoded, left)
        torch.sub(rows, left, out=left)

    def add_rows(self, encoded: Tensor, share: float, total: Tensor) -> None:
        """``total <- total + share * decoded``, in fp32. No element of ``total`` is -0.0."""
        term = torch.empty_like(total)
        self.decode_rows(encoded, term)
        total.add_(term.mul_(share))

    def encoded_bytes(self, elements: int) -> int:
        """Bytes on the wire: those of the full blocks, and of a shorter one at the end."""
        full, rest = divmod(elements, self.block)
        return full * self.row_bytes(self.block) + (self.row_bytes(rest) if rest else 0)

    def encode(self, piece: Tensor, out: Tensor | None = None, left: Tensor | None = None) -> Tensor:
        """``piece`` (1-D, contiguous, fp32) as a 1-D uint8 tensor, ``out`` if that is given. ``left``, like ``piece``,
        becomes what the encoding leaves out: ``piece - decoded``.

        Raises:
            FloatingPointError: ``piece`` contains NaN or Inf.
        """
        piece = piece.detach()
        if out is None:
            out = torch.empty(self.encoded_bytes(piece.numel()), dtype=torch.uint8, device=piece.device)
        for encoded, rows, *rest in self._parts(out, piece, *([] if left is None else [left])):
            if not math.isfinite(self.encode_rows(rows, encoded)):
                raise FloatingPointError(f"the codec {self.name} cannot encode NaN or Inf; send finite values only")
            if rest:
                self.leave_rows(rows, encoded, *rest)
        return out

    def decode(self, encoded: Tensor, out: Tensor) -> Tensor:
        """Writes the values into ``out`` (1-D, contiguous, fp32) and returns it."""
        for place, rows in self._parts(encoded, out.detach()):
            self.decode_rows(place, rows)
        return out

    def add(self, encoded: Tensor, share: float, total: Tensor) -> None:
        """``total <- total + share * decoded`` (1-D, contiguous, fp32). No element of ``total`` is -0.0."""
        for place, rows in self._parts(encoded, total):
            self.add_rows(place, share, rows)

    def _parts(self, encoded: Tensor, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yields rows of ``encoded`` with their rows of each of ``flats``; a shorter last block by itself."""
        numel, cpu = flats[0].numel(), encoded.device.type == "cpu"
        assert encoded.numel() == self.encoded_bytes(numel)
        assert all(flat.dtype == torch.float32 and flat.numel() == numel for flat in flats)
        full, rest = divmod(numel, self.block)
        row_bytes = self.row_bytes(self.block)
        at_once = max(1, (_PART if cpu else _PART_ELSEWHERE) // self.block)
        for start in range(0, full, at_once):
            stop = min(full, start + at_once)
            yield (
                encoded[start * row_bytes : stop * row_bytes].view(-1, row_bytes),
                *(flat[start * self.block : stop * self.block].view(-1, self.block) for flat in flats),
            )
        if rest:
            yield encoded[full * row_bytes :].view(1, -1), *(flat[-rest:].view(1, rest) for flat in flats)
