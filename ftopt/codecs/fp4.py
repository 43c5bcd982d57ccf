"""A sign, three bits of exponent, no mantissa, and a scale for each block of 256 values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ftopt.codecs.bf16 import MAX
from ftopt.codecs.blockwise import Blockwise, bytes_as
from ftopt.common.later import torch
from ftopt.kernels import OF_FP4

if TYPE_CHECKING:
    from torch import Tensor

_LEVELS = 7
_LOWEST = (127 - _LEVELS) << 7
"""The bf16 of 2^-7, as an integer: one exponent below the smallest magnitude."""
_HALF = 1 << 6
"""Half of bf16's mantissa. Added to a bf16's bits it carries into the exponent from 1.5 * 2^e on."""


@dataclass(frozen=True)
class FP4(Blockwise):
    """FP4 E3M0, blockwise: 2 bytes of scale and 128 of codes for 256 values, 7.88 times fewer bytes than fp32.

    The scale s of a block is max|x| rounded to bf16 (capped at the largest bf16). A code is a sign and an exponent
    field f of three bits: f of 1 to 7 stands for ``s * 2^(f - 7)``, so s, s/2, ... s/64, and **f = 0 for zero**: a
    block's zeros stay zeros, at the price of an eighth power of two. r = |x| / s is rounded to the nearest magnitude
    (``1.5 * 2^e`` rounds up); below ``0.75 * 2^-6`` it becomes zero. (r is first rounded to bf16, so these limits hold
    to 2^-9 of r.)

    A block of n values is the scale (bf16, little endian) and ceil(n/2) bytes: byte i holds value i in its low half
    and value ceil(n/2) + i in its high half.

    Error of each value x: at most ``0.342 |x|`` where ``|x| >= max|x| / 64``, and ``max|x| / 84`` where it is smaller;
    thus at most 0.26 of the block's max|x|. Add 2^-133 for bf16's denormals, and for blocks below them, which become
    zeros.

    Source: E3M0 for outer gradients is Streaming DiLoCo's (arXiv 2501.18512), which gives neither scales nor rounding:
    those are ours.
    """

    name: ClassVar[str] = "fp4"
    kernel: ClassVar[int] = OF_FP4

    def row_bytes(self, values: int) -> int:
        return 2 + (values + 1) // 2

    def encode_rows(self, rows: Tensor, out: Tensor) -> float:
        """Rounds, shifts and limits exponents as integers, without a logarithm."""
        largest = rows.abs().amax(1, keepdim=True)
        scale = largest.clamp(max=MAX).to(torch.bfloat16)
        out[:, :2].copy_(scale.view(torch.uint8))
        divisor = scale.float()
        bits = (rows / divisor.masked_fill_(divisor == 0, 1.0)).to(torch.bfloat16).view(torch.int16)
        codes = (bits & 0x7FFF).add_(_HALF - _LOWEST).clamp_(0, (_LEVELS << 7) | 0x7F).bitwise_right_shift_(7)
        codes |= bits.bitwise_right_shift_(12).bitwise_and_(8)
        low, high = _halves(codes)
        if high.shape[1] < low.shape[1]:
            high = torch.nn.functional.pad(high, (0, 1))
        out[:, 2:].copy_(torch.add(low, high, alpha=16))
        return float(largest.amax())

    def decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        """The field f becomes a bf16's exponent, 2^(f - 127), where f = 0 is zero; the rest is two multiplications."""
        pairs = encoded[:, 2:].to(torch.int16)
        codes = torch.empty(out.shape, dtype=torch.int16, device=out.device)
        low, high = _halves(codes)
        torch.bitwise_left_shift(pairs, 7, out=low)
        torch.bitwise_left_shift(pairs[:, : high.shape[1]], 3, out=high)
        signs = (codes & 0x400).bitwise_left_shift_(5)
        codes.bitwise_and_(0x380).bitwise_or_(signs)
        scale = bytes_as(torch.bfloat16, encoded[:, :2]).float()
        out.copy_(codes.view(torch.bfloat16)).mul_(2.0 ** (127 - _LEVELS)).mul_(scale)


def _halves(codes: Tensor) -> tuple[Tensor, Tensor]:
    half = (codes.shape[1] + 1) // 2
    return codes[:, :half], codes[:, half:]
