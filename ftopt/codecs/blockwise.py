"""Base of the lossy codecs: it treats a payload as rows, one per block, and works on parts that fit in the cache.

A part is computed by a kernel, if there is one and it is ready (`ftopt.kernels`), or by torch, with the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy

from ftopt.common.later import torch
from ftopt.kernels.loader import Kernel, Loader, fits

if TYPE_CHECKING:
    from torch import Tensor

_PART, _PART_ELSEWHERE = 1 << 18, 1 << 24
"""Elements processed at a time. On a CPU 1 MiB of fp32: with fewer, calls dominate; more do not fit in the cache."""

NOT_FINITE = 0x7F800000
"""The bits of infinity."""


class Kernels(NamedTuple):
    """The kernels of codecs."""

    encode: Kernel
    decode: Kernel


KERNELS = Loader("codecs", "ftopt.kernels.codecs", Kernels)


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
    """A codec that encodes rows of `block` values, each row by itself.

    Attributes:
        kernel: its number in `ftopt.kernels`; 0: it has no kernels.
    """

    block: ClassVar[int] = 256
    exact: ClassVar[bool] = False
    kernel: ClassVar[int] = 0

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

    def form(self, last: int) -> tuple[int, int, int, int, int, int]:
        """What kernels know of the codec (`ftopt.kernels.codecs.encode`), if the last block has ``last`` values."""
        return self.kernel, self.block, self.row_bytes(self.block), 0, 0, 0

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

    def encode(
        self, piece: Tensor, out: Tensor | None = None, left: Tensor | None = None, more: Tensor | None = None
    ) -> Tensor:
        """See `Codec`."""
        piece = piece.detach()
        if out is None:
            out = torch.empty(self.encoded_bytes(piece.numel()), dtype=torch.uint8, device=piece.device)
        if not self._encode(KERNELS.ready(), piece, out, left, more):
            raise FloatingPointError(f"the codec {self.name} cannot encode NaN or Inf; send finite values only")
        return out

    def decode(self, encoded: Tensor, out: Tensor) -> Tensor:
        """Writes the values into ``out`` (1-D, contiguous, fp32) and returns it."""
        self._decode(KERNELS.ready(), encoded, out.detach(), None)
        return out

    def add(self, encoded: Tensor, share: float, total: Tensor) -> None:
        """``total <- total + share * decoded`` (1-D, contiguous, fp32). No element of ``total`` is -0.0."""
        self._decode(KERNELS.ready(), encoded, total, share)

    def agrees(self, kernels: Kernels) -> bool:
        """Whether kernels and torch give the same bits, on values that are the same each time."""
        n, chance = self.block, torch.Generator().manual_seed(0)
        values = torch.randn(4 * n + 77, generator=chance, dtype=torch.float32, device="cpu").exp_()
        values *= torch.randn(len(values), generator=chance)
        values[:n] = values[-1] = 0.25  # ties
        values[n : n + 8] = values.new_tensor([0.0, -0.0, 1e-45, -1e-39, 3.4e38, -3.38e38, 1e-20, 1.0])
        values[2 * n : 3 * n].mul_(1e-38)
        more, encoded = -torch.zeros_like(values), torch.empty(2, self.encoded_bytes(len(values)), dtype=torch.uint8)
        more[3 * n :] = values[3 * n :].flip(0)
        found = torch.ones(2, 3, len(values))
        for by, each, (left, decoded, total) in zip((kernels, None), encoded, found, strict=True):
            self._encode(by, values.clone(), each, left, more)
            self._decode(by, each, decoded, None)
            self._decode(by, each, total, 0.3)
        return torch.equal(*encoded) and torch.equal(*found.view(torch.int32))

    def _encode(
        self, kernels: Kernels | None, piece: Tensor, out: Tensor, left: Tensor | None, more: Tensor | None = None
    ) -> bool:
        """By kernels, where they can, or by torch. False: a value is not finite."""
        flats = [flat for flat in (piece, left, more) if flat is not None]
        if self.kernel and kernels is not None and fits(out, *flats):
            self._check(out, *flats)
            arrays = ((piece[:0] if flat is None else flat).numpy() for flat in (left, more))
            form = self.form(piece.numel() % self.block)
            return bool(kernels.encode(piece.numpy(), out.numpy(), *arrays, form) < NOT_FINITE)
        if more is not None:
            piece.add_(more)
        for encoded, rows, *rest in self._parts(out, *([piece] if left is None else [piece, left])):
            if not math.isfinite(self.encode_rows(rows, encoded)):
                return False
            if rest:
                self.leave_rows(rows, encoded, *rest)
        return True

    def _decode(self, kernels: Kernels | None, encoded: Tensor, out: Tensor, share: float | None) -> None:
        """Sets ``out``, or adds a share, by kernels, where they can, or by torch."""
        if self.kernel and kernels is not None and fits(encoded, out):
            self._check(encoded, out)
            factor = numpy.float32(share or 0.0), share is not None
            if not kernels.decode(encoded.numpy(), out.numpy(), *factor, self.form(out.numel() % self.block)):
                raise RuntimeError(f"the codec {self.name} has not encoded these bytes")
            return
        for part, rows in self._parts(encoded, out):
            if share is None:
                self.decode_rows(part, rows)
            else:
                self.add_rows(part, share, rows)

    def _check(self, encoded: Tensor, *flats: Tensor) -> None:
        size = self.encoded_bytes(flats[0].numel())
        assert encoded.dtype == torch.uint8 and encoded.shape == (size,)
        assert all(flat.dtype == torch.float32 and flat.shape == flats[0].shape for flat in flats)

    def _parts(self, encoded: Tensor, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yields rows of ``encoded`` with their rows of each of ``flats``; a shorter last block by itself."""
        self._check(encoded, *flats)
        full, rest = divmod(flats[0].numel(), self.block)
        row_bytes = self.row_bytes(self.block)
        at_once = max(1, (_PART if encoded.is_cpu else _PART_ELSEWHERE) // self.block)
        for start in range(0, full, at_once):
            stop = min(full, start + at_once)
            yield (
                encoded[start * row_bytes : stop * row_bytes].view(-1, row_bytes),
                *(flat[start * self.block : stop * self.block].view(-1, self.block) for flat in flats),
            )
        if rest:
            yield encoded[full * row_bytes :].view(1, -1), *(flat[-rest:].view(1, rest) for flat in flats)
