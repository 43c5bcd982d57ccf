"""From a recipe's word to a codec."""

from __future__ import annotations

from ftopt.codecs.bf16 import BF16
from ftopt.codecs.codec import Codec
from ftopt.codecs.fp4 import FP4
from ftopt.codecs.fp32 import FP32
from ftopt.codecs.int8 import Int8
from ftopt.codecs.top_k import TopK

_PLAIN: dict[str, Codec] = {"fp32": FP32(), "bf16": BF16(), "int8": Int8(), "fp4": FP4()}
_ALLOWED = "fp32, bf16, int8, fp4, top_k:FRACTION:BITS (top_k alone is top_k:0.03:2)"


def codec_named(spec: str) -> Codec:
    """The codec that ``spec`` names: ``codec_named(codec.name) == codec``.

    Args:
        spec: ``fp32``, ``bf16``, ``int8``, ``fp4``, or ``top_k`` with its settings, ``top_k:FRACTION:BITS``
            (``top_k:0.01:4``); what is left out at the end takes its default.

    Raises:
        ValueError: no such codec, or a setting that is no number or out of range; says what was given and what is
            allowed.
    """
    word, *settings = spec.split(":")
    if word in _PLAIN and not settings:
        return _PLAIN[word]
    if word in _PLAIN:
        raise ValueError(f"codec {spec!r}: {word} has no settings; use {word!r}")
    if word != "top_k":
        raise ValueError(f"codec {spec!r}; allowed: {_ALLOWED}")
    if len(settings) > 2:
        raise ValueError(f"codec {spec!r}: top_k has two settings; use top_k:FRACTION:BITS, as in top_k:0.01:4")
    try:
        fraction = float(settings[0]) if settings else TopK.fraction
        bits = int(settings[1]) if settings[1:] else TopK.bits
    except ValueError:
        raise ValueError(
            f"codec {spec!r}: FRACTION must be a number and BITS a whole one; "
            "use top_k:FRACTION:BITS, as in top_k:0.01:4"
        ) from None
    try:
        return TopK(fraction, bits)
    except ValueError as error:
        raise ValueError(f"codec {spec!r}: {error}") from None
