"""The largest values of each chunk, in few bits each, and their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy

from ftopt.codecs.bf16 import MAX
from ftopt.codecs.blockwise import NOT_FINITE, Blockwise, bytes_as
from ftopt.codecs.int8 import Int8
from ftopt.common.later import torch
from ftopt.errors import Settings, UserError, check_number
from ftopt.kernels import OF_TOP_K

if TYPE_CHECKING:
    from torch import Tensor

_INDEX_BITS = 12
_NO_SIGN = 0x7FFFFFFF
"""All bits of an fp32 but its sign. Without a sign the order of bits is that of values."""
_GATHER = 0x0102040810204080
"""An int64 of eight bytes, each 0 or 1, times this has their bits in its highest byte."""


@dataclass(frozen=True)
class TopK(Settings, Blockwise):
    """Keeps the largest magnitudes of each chunk of 4096 values; all others are decoded as zero.

    A chunk of n values keeps ``k = ceil(fraction * n)``, at least 1; of equal magnitudes the first ones. Let lo and hi
    be the smallest and the largest magnitude kept, rounded to bf16 (capped at the largest bf16). A value is sent as its
    place (12 bits), its sign, and ``j = round((|x| - lo) / step)`` in ``bits - 1`` bits; it is decoded as
    ``sign * (lo + j * step)``, ``step = (hi - lo) / (2^(bits-1) - 1)``. With ``bits=2`` the two levels are lo and hi:
    no level is spent on magnitudes that a kept value cannot have, and a chunk of zeros stays zero.

    Encoded, a chunk is lo and hi (bf16) and k packed words of 12 + bits bits, lowest bit first, in order of place: word
    = place * 2^bits + sign * 2^(bits-1) + j. With fraction 0.03 and 2 bits, 4096 values take 220 bytes, 74 times fewer
    than in fp32.

    The error of a value not kept is its magnitude, at most lo; of a kept value ``step / 2 + max|x| / 256``. Both are at
    most the chunk's max|x|, plus 2^-133 (denormals). Meant for error feedback, which sends the rest later.

    Replicas keep different values, so a sum of M payloads has up to M k values per chunk. The sum is sent with room for
    all of them, in 8 bits each (`for_sum`), because no error feedback would recover values left out there.

    Args:
        fraction: share of the values that is kept, in (0, 1]. Default 0.03.
        bits: bits per kept value for sign and magnitude, 2 to 8. Default 2.

    Raises:
        ftopt.errors.UserError: an argument out of range.

    Source: SparseLoCo (arXiv 2508.15706) for chunks, fractions of 1-3 % and 2-bit values; the levels between lo and hi
    are ours.
    """

    fraction: float = 0.03
    bits: int = 2

    block: ClassVar[int] = 1 << _INDEX_BITS
    kernel: ClassVar[int] = OF_TOP_K

    def __post_init__(self) -> None:
        check_number("top_k: fraction", self.fraction, "(0, 1]", hint="0.01 to 0.03 is usual")
        if type(self.bits) is not int or not 2 <= self.bits <= 8:
            raise UserError(f"top_k: bits={self.bits!r}; must be 2 to 8")

    @property
    def name(self) -> str:
        """``top_k:FRACTION:BITS``."""
        return f"top_k:{self.fraction}:{self.bits}"

    def kept(self, values: int) -> int:
        """The number of values kept from a chunk of ``values``."""
        return min(values, max(1, math.ceil(self.fraction * values)))

    def for_sum(self, payloads: int) -> Blockwise:
        """Keeps as many values as ``payloads`` payloads together, in 8 bits; int8 where that takes fewer bytes."""
        sparse, dense = TopKSum(self.fraction, 8, payloads), Int8()
        return sparse if sparse.encoded_bytes(self.block) < dense.encoded_bytes(self.block) else dense

    def row_bytes(self, values: int) -> int:
        return 4 + (self.kept(values) * (_INDEX_BITS + self.bits) + 7) // 8

    def form(self, last: int) -> tuple[int, int, int, int, int, int]:
        return *super().form(last)[:3], self.kept(self.block), self.kept(last), self.bits

    def encode_rows(self, rows: Tensor, out: Tensor) -> float:
        n, sizes = rows.shape[1], rows.view(torch.int32) & _NO_SIGN
        if (peak := int(sizes.amax())) >= NOT_FINITE:
            return math.inf
        places = _largest(sizes, self.kept(n))
        values = rows.view(-1).take(places).view(len(rows), -1)
        magnitudes = values.abs()
        ends = torch.cat([magnitudes.amin(1, keepdim=True), magnitudes.amax(1, keepdim=True)], 1)
        ends = ends.clamp_(max=MAX).to(torch.bfloat16)
        out[:, :4].copy_(ends.view(torch.uint8))
        low, step = self._levels(ends)
        j = magnitudes.sub_(low).div_(step.masked_fill_(step == 0, 1.0)).round_().clamp_(0, self._top)
        words = places.remainder_(n).view(values.shape).to(torch.int32).bitwise_left_shift_(self.bits)
        words |= (values < 0).to(torch.int32).bitwise_left_shift_(self.bits - 1)
        words |= j.to(torch.int32)
        out[:, 4:].copy_(_pack(words, _INDEX_BITS + self.bits))
        return float(peak)

    def decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        out.zero_().scatter_(1, *self._kept(encoded, out.shape[1]))

    def leave_rows(self, rows: Tensor, encoded: Tensor, left: Tensor) -> None:
        places, values = self._kept(encoded, rows.shape[1])
        left.copy_(rows).scatter_(1, places, rows.gather(1, places).sub_(values))

    def add_rows(self, encoded: Tensor, share: float, total: Tensor) -> None:
        places, values = self._kept(encoded, total.shape[1])
        total.scatter_(1, places, total.gather(1, places).add_(values.mul_(share)))

    def _kept(self, encoded: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Places (int64) and values (fp32) of what was kept, [r, k] each."""
        low, step = self._levels(bytes_as(torch.bfloat16, encoded[:, :4]))
        words = _unpack(encoded[:, 4:], _INDEX_BITS + self.bits, self.kept(n))
        values = (words & self._top).float().mul_(step).add_(low)
        values = torch.where((words & (self._top + 1)) != 0, -values, values)
        return words.bitwise_right_shift_(self.bits).long(), values

    @property
    def _top(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _levels(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        low, high = ends.float()[:, :1], ends.float()[:, 1:]
        return low, (high - low).mul_(1 / self._top)


@dataclass(frozen=True)
class TopKSum(TopK):
    """`TopK` with room for the values that a number of payloads keep."""

    payloads: int = 1

    def kept(self, values: int) -> int:
        return min(values, self.payloads * super().kept(values))


def _least(sizes: Tensor, k: int) -> Tensor:
    """The k-th largest value of each row: [r, 1]. On a CPU by numpy, which is 8 to 20 times as fast as `torch.topk`."""
    at = sizes.shape[1] - k
    if not sizes.is_cpu:
        return sizes.topk(k, 1, sorted=False).values.amin(1, keepdim=True)
    return torch.from_numpy(numpy.partition(sizes.numpy(), at, axis=1)[:, at : at + 1])


def _largest(sizes: Tensor, k: int) -> Tensor:
    """Places of the k largest values of each row in the flat tensor, row by row; of equal values the first ones."""
    least = _least(sizes, k)
    # numpy compares and finds three times as fast as torch does on a CPU.
    places = (
        torch.from_numpy(numpy.flatnonzero(sizes.numpy() >= least.numpy())) if sizes.is_cpu else _true(sizes >= least)
    )
    if len(places) > len(sizes) * k:
        larger, ties = sizes > least, sizes == least
        missing = k - larger.sum(1, keepdim=True)
        places = _true(larger | (ties & (ties.cumsum(1) <= missing)))
    return places


def _true(chosen: Tensor) -> Tensor:
    return chosen.view(-1).nonzero().view(-1)


def _pack(words: Tensor, width: int) -> Tensor:
    """``words`` (int32, [r, k], below 2^width) as bytes (uint8, [r, ceil(k * width / 8)]), lowest bit first."""
    rows, k = words.shape
    bits = torch.zeros(rows, (k * width + 7) // 8 * 8, dtype=torch.uint8, device=words.device)
    single = (words.unsqueeze(2) >> torch.arange(width, dtype=torch.int32, device=words.device)).bitwise_and_(1)
    bits[:, : k * width].view(rows, k, width).copy_(single)
    return bits.view(torch.int64).mul(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def _unpack(packed: Tensor, width: int, k: int) -> Tensor:
    """The inverse of `_pack`: int32, [r, k]. Each word lies within four bytes."""
    first = torch.arange(0, k * width, width, dtype=torch.int32, device=packed.device)
    four = torch.nn.functional.pad(packed, (0, 3)).unfold(1, 4, 1)[:, first >> 3]
    return four.view(torch.int32).squeeze(2).bitwise_right_shift_(first & 7).bitwise_and_((1 << width) - 1)
