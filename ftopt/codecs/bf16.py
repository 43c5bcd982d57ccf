"""The upper half of an fp32: 8 bits of exponent, 8 of precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ftopt.codecs.blockwise import Blockwise, bytes_as, in_place
from ftopt.common.later import torch
from ftopt.kernels import OF_BF16

if TYPE_CHECKING:
    from torch import Tensor

MAX = (2 - 2.0**-7) * 2.0**127


@dataclass(frozen=True)
class BF16(Blockwise):
    """Rounds each value to bf16: 2 bytes per value, half of fp32's.

    The error of each value x is at most ``2^-8 |x| + 2^-133``. Values that would round up to Inf (above 3.39e38) become
    the largest bf16.
    """

    name: ClassVar[str] = "bf16"
    block: ClassVar[int] = 1024  # with 4096 a kernel takes a fifth longer on what comes from memory
    kernel: ClassVar[int] = OF_BF16

    def row_bytes(self, values: int) -> int:
        return 2 * values

    def encode_rows(self, rows: Tensor, out: Tensor) -> float:
        """Rounds to nearest, ties to even."""
        norm = float(torch.linalg.vector_norm(rows))
        if norm > MAX or not math.isfinite(norm):  # rare: some value may be out of range or not finite
            norm = float(rows.abs().amax())
            rows = rows.clamp(-MAX, MAX) if norm > MAX else rows
        place = in_place(torch.bfloat16, out)
        if place is None:
            out.copy_(rows.to(torch.bfloat16).view(torch.uint8))
        else:
            place.copy_(rows)
        return norm

    def decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(bytes_as(torch.bfloat16, encoded))
