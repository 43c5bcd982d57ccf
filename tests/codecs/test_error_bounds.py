"""Each codec's bound on its error, on whatever finite fp32 there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ftopt.codecs import BF16, FP4, FP32, Codec, Int8, TopK
from ftopt.codecs.top_k import TopKSum
from ftopt.transport.local import roundtrip

LOSSY: list[Codec] = [BF16(), Int8(), FP4(), TopK(0.01, 4), TopK(0.05, 2), TopK(0.3, 3), TopK(1.0, 8)]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
LENGTHS = [0, 1, 2, 3, 255, 256, 257, 511, 1000, 4095, 4096, 4097, 9001]
LARGEST = torch.finfo(torch.float32).max


def bound(codec: Codec, x: Tensor) -> Tensor:
    """The docstrings' bounds, for one block ``x``."""
    size, top = x.abs().double(), x.abs().max().double()
    if isinstance(codec, BF16):
        return size * 2**-8 + 2**-133
    if isinstance(codec, Int8):
        return (top / 100 if top > 3.37e38 else top / 253 + 2**-142).expand(len(x))
    if isinstance(codec, FP4):
        return torch.where(size >= top / 64, size * 0.342, top / 84) + 2**-133
    assert isinstance(codec, TopK)
    largest, places = size.topk(codec.kept(len(x)))
    limit = size.clamp(max=largest[-1]) + 2**-133
    limit[places] = (largest[0] - largest[-1]) / (2 * (2 ** (codec.bits - 1) - 1)) + top / 256 + 2**-133
    ties = size == largest[-1]  # which of them are kept is not said
    limit[ties] = limit[ties].maximum(size[ties])
    return limit


def check(codec: Codec, x: Tensor) -> None:
    encoded = codec.encode(x)
    assert encoded.dtype == torch.uint8 and encoded.shape == (codec.encoded_bytes(len(x)),)
    out = codec.decode(encoded, torch.full_like(x, float("nan")))
    assert bool(out.isfinite().all())
    for block, got in zip(x.split(codec.block), out.split(codec.block), strict=True):
        if len(block):
            error = (got.double() - block.double()).abs()
            assert bool((error <= bound(codec, block)).all()), (codec, float((error - bound(codec, block)).max()))


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@settings(max_examples=60, deadline=None)
@given(values=st.lists(FINITE, max_size=30), repeats=st.sampled_from([1, 9, 150]))
def test_any_values(codec: Codec, values: list[float], repeats: int) -> None:
    check(codec, torch.tensor(values * repeats, dtype=torch.float32))


@pytest.mark.long
@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@settings(max_examples=60, deadline=None)
@given(
    length=st.sampled_from(LENGTHS),
    lowest=st.integers(-149, 120),
    ratio=st.sampled_from([0, 1, 8, 60, 250]),
    zeros=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 2**31),
)
def test_any_ratios(codec: Codec, length: int, lowest: int, ratio: int, zeros: float, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    exponents = torch.randint(lowest, min(122, lowest + ratio) + 1, (length,), generator=chance)
    x = (torch.randn(length, generator=chance).double() * 2.0**exponents).float()
    x[torch.rand(length, generator=chance) < zeros] = 0.0
    check(codec, x)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-40, 2.0**-133, 1.0, -3.0, 3.38e38, -LARGEST])
def test_blocks_of_one_value(codec: Codec, value: float) -> None:
    for length in LENGTHS:
        check(codec, torch.full((length,), value))


@pytest.mark.parametrize("codec", [FP32(), *LOSSY], ids=lambda codec: codec.name)
def test_zeros_stay_zeros_among_other_values(codec: Codec) -> None:
    x = torch.zeros(10_000)
    x[[1, 300, 301, 9999]] = torch.tensor([1.0, -1e-3, 1e20, 7.0])
    assert bool((roundtrip(codec, x, torch.empty_like(x))[x == 0] == 0).all())


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 5000, 8191, 8195])
def test_what_is_not_finite_is_refused(codec: Codec, value: float, place: int) -> None:
    x = torch.randn(8196)
    x[place] = value
    with pytest.raises(FloatingPointError, match=rf"codec {codec.name} cannot encode NaN or Inf"):
        codec.encode(x)


@pytest.mark.parametrize(("fraction", "length"), [(0.02, 3 * 4096 + 100), (0.05, 30), (0.2, 5000)])
def test_a_sum_of_top_k_payloads_loses_no_value_on_the_second_hop(fraction: float, length: int) -> None:
    codec = TopK(fraction, 4)
    chance = torch.Generator().manual_seed(length)
    payloads = [torch.randn(length, generator=chance) for _ in range(3)]
    total = sum((roundtrip(codec, x, torch.empty_like(x)) for x in payloads), torch.zeros(length))
    got = roundtrip(codec.for_sum(3), total, torch.empty_like(total))
    for part, sent in zip(total.split(4096), got.split(4096), strict=True):
        assert float((part - sent).abs().max()) <= float(part.abs().max()) / 120
    assert codec.for_sum(3) == (Int8() if fraction == 0.2 else TopKSum(fraction, 8, payloads=3))


def test_top_k_keeps_as_many_as_it_says() -> None:
    x = torch.randn(3 * 4096 + 100, generator=torch.Generator().manual_seed(1))
    out = roundtrip(TopK(0.02, 5), x, torch.empty_like(x))
    assert [int((chunk != 0).sum()) for chunk in out.split(4096)] == [82, 82, 82, 2]
