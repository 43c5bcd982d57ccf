"""The face of a codec."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """Encodes pieces of a flat fp32 payload. Without state: error feedback is the optimizer's.

    ``decode(encode(x))`` must give the same bits on every machine that gets the same bytes.
    """

    @property
    def name(self) -> str:
        """The recipe's name for it."""

    def encoded_bytes(self, elements: int) -> int:
        """Bytes on the wire for a piece of ``elements`` values."""

    def encode(self, piece: Tensor) -> Tensor:
        """``piece`` (1-D, contiguous, fp32) as a 1-D contiguous uint8 tensor; may share its memory."""

    def decode(self, encoded: Tensor, out: Tensor) -> Tensor:
        """Writes the values into ``out`` (1-D, contiguous, fp32, the length of the piece) and returns it."""
