"""Full precision: the bytes are the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ftopt.common.later import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FP32:
    """The identity: 4 bytes per value, lossless (NaN and Inf pass, too); encoding copies nothing."""

    name: ClassVar[str] = "fp32"
    block: ClassVar[int] = 1
    exact: ClassVar[bool] = True

    def for_sum(self, payloads: int) -> FP32:
        return self

    def encoded_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(
        self, piece: Tensor, out: Tensor | None = None, left: Tensor | None = None, more: Tensor | None = None
    ) -> Tensor:
        """The same memory, seen as bytes, or a copy in ``out``."""
        if more is not None:
            piece.add_(more)
        if left is not None:
            left.zero_()
        encoded = piece.view(torch.uint8)
        return encoded if out is None else out.copy_(encoded)

    def decode(self, encoded: Tensor, out: Tensor) -> Tensor:
        out.view(torch.uint8).copy_(encoded)
        return out

    def add(self, encoded: Tensor, share: float, total: Tensor) -> None:
        total.add_(self.decode(encoded, torch.empty_like(total)).mul_(share))
