"""The interface of codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Protocol):
    """Encodes pieces of a flat fp32 payload. Stateless: the optimizer does error feedback.

    For all codecs:

    - A payload is a sequence of blocks of `block` elements; the last may be shorter. Each block is encoded by itself,
      and the blocks' bytes follow each other. So a piece that begins at a multiple of `block` has the same bytes alone
      as within the whole payload.
    - `decode` gives the same bits on every machine that gets the same bytes: unfused elementwise arithmetic. (Not in a
      process that flushes denormals, `torch.set_flush_denormal`.)
    - Bytes that are all zero decode to zeros.
    - All tensors of a call, and its result, are on one device.
    - A lossy codec refuses NaN and Inf with FloatingPointError: a contribution that is not finite weighs nothing and is
      not sent.
    """

    @property
    def name(self) -> str:
        """Its name in recipes, with its settings; `codec_named` makes an equal codec from it."""

    @property
    def exact(self) -> bool:
        """Whether decoding restores the encoded values bit for bit."""

    @property
    def block(self) -> int:
        """Elements that are encoded together."""

    def for_sum(self, payloads: int) -> Codec:
        """The codec for a sum of ``payloads`` decoded payloads: itself, or one whose `block` divides its own."""

    def encoded_bytes(self, elements: int) -> int:
        """Bytes on the wire for a piece of ``elements`` values."""

    def encode(
        self, piece: Tensor, out: Tensor | None = None, left: Tensor | None = None, more: Tensor | None = None
    ) -> Tensor:
        """``piece`` (1-D, contiguous, fp32) as a 1-D contiguous uint8 tensor: ``out``, of `encoded_bytes` elements, or
        one that may share the memory of ``piece``. ``left``, like ``piece``, becomes what the encoding leaves out:
        ``piece - decoded``. ``more``, like ``piece``, is added to ``piece`` first, perhaps in place.

        Raises:
            FloatingPointError: the codec is lossy, and ``piece`` contains NaN or Inf.
        """

    def decode(self, encoded: Tensor, out: Tensor) -> Tensor:
        """Writes the values into ``out`` (1-D, contiguous, fp32, the length of the piece) and returns it."""

    def add(self, encoded: Tensor, share: float, total: Tensor) -> None:
        """``total <- total + share * decoded`` (1-D, contiguous, fp32), with a rounding for each of the two operations.
        ``total`` is zero, or a sum of such terms, so that no element is -0.0."""
