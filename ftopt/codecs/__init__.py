"""Wire precision: how pieces of a payload are encoded as bytes and decoded.

A new codec is one file here, a frozen dataclass that is a `Codec`, and one entry in `ftopt.codecs.named.CODECS`. Its
settings are the fields that it takes by position (``top_k:FRACTION:BITS``). `Blockwise` is the base of codecs that
encode rows of equal length. See "Adding a codec" in ``docs/methods.md``.
"""

from ftopt.codecs.bf16 import BF16 as BF16
from ftopt.codecs.codec import Codec as Codec
from ftopt.codecs.fp4 import FP4 as FP4
from ftopt.codecs.fp32 import FP32 as FP32
from ftopt.codecs.int8 import Int8 as Int8
from ftopt.codecs.named import codec_named as codec_named
from ftopt.codecs.top_k import TopK as TopK
