from __future__ import annotations

import pytest

from ftopt.codecs import BF16, FP4, FP32, Codec, Int8, TopK, codec_named
from ftopt.errors import UserError


@pytest.mark.parametrize(
    ("spec", "codec"),
    [
        ("fp32", FP32()),
        ("bf16", BF16()),
        ("int8", Int8()),
        ("fp4", FP4()),
        ("top_k", TopK()),
        ("top_k:0.01", TopK(0.01)),
        ("top_k:0.01:4", TopK(0.01, 4)),
        ("top_k:1e-3:8", TopK(0.001, 8)),
    ],
)
def test_a_codec_and_its_name_are_two_ways_to_say_the_same(spec: str, codec: Codec) -> None:
    assert codec_named(spec) == codec
    assert codec_named(codec.name) == codec
    assert codec.exact == (spec == "fp32")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp8", "codec='fp8'; allowed: fp32, bf16, int8, fp4, top_k:FRACTION:BITS; settings may be left out"),
        ("", "codec=''; allowed: fp32, bf16, int8, fp4, top_k:FRACTION:BITS; settings may be left out"),
        ("fp4:2", "codec='fp4:2': fp4 has no settings; use fp4"),
        ("top_k:0.1:4:1", "codec='top_k:0.1:4:1': top_k has 2 settings; use top_k:FRACTION:BITS"),
        ("top_k:x", "codec='top_k:x': fraction='x'; must be a number, as in top_k:0.03:2"),
        ("top_k:0.1:x", "codec='top_k:0.1:x': bits='x'; must be a whole number, as in top_k:0.03:2"),
        (
            "top_k:0:4",
            "codec='top_k:0:4': top_k: fraction=0.0; must be a number in (0, 1]; 0.01 to 0.03 is usual",
        ),
        (
            "top_k:nan:4",
            "codec='top_k:nan:4': top_k: fraction=nan; must be a number in (0, 1]; 0.01 to 0.03 is usual",
        ),
        ("top_k:0.1:9", "codec='top_k:0.1:9': top_k: bits=9; must be 2 to 8"),
    ],
)
def test_what_names_no_codec_is_refused_with_what_is_allowed(spec: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        codec_named(spec)
    assert str(caught.value) == message
