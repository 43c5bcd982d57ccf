"""Wire precision: how a piece of a payload becomes bytes and comes back."""

from ftopt.codecs.codec import Codec as Codec
from ftopt.codecs.fp32 import FP32 as FP32
