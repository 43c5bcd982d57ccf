"""Each codec against value-by-value loops, bit for bit, and its layout."""

from __future__ import annotations

import pytest
import torch

from ftopt.codecs import BF16, FP4, FP32, Codec, Int8, TopK
from ftopt.transport.local import roundtrip
from tests.reference.codecs import through

CODECS: list[Codec] = [
    FP32(),
    BF16(),
    Int8(),
    FP4(),
    TopK(0.004, 8),
    TopK(0.4, 4),
    *(TopK(0.03, bits) for bits in range(2, 9)),
]


def by_name(codecs: list[Codec]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("codec", codecs, ids=lambda codec: codec.name)


def payload(length: int, seed: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=chance) * torch.exp(2 * torch.randn(length, generator=chance))


def bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.int32)


@by_name(CODECS)
@pytest.mark.parametrize("length", [1, 3, 256, 300, 4096, 5001])
def test_the_values_are_those_of_the_plain_loop(codec: Codec, length: int) -> None:
    x = payload(length, length)
    out = codec.decode(codec.encode(x), torch.empty_like(x))
    assert out.tolist() == through(codec.name, x.tolist())


@by_name([FP4(), Int8()])
def test_ties_and_limits_are_those_of_the_plain_loop(codec: Codec) -> None:
    x = torch.tensor([1.0, 0.75, 0.7499, 0.375, -0.3749, 2**-6, 0.75 * 2**-6, 0.74 * 2**-6, -(2**-7), 0.0, 3.5 / 127])
    assert codec.decode(codec.encode(x), torch.empty_like(x)).tolist() == through(codec.name, x.tolist())


@by_name(CODECS)
@pytest.mark.parametrize("length", [0, 1, 300, 5001, (1 << 18) + 4099])
def test_what_is_left_out_and_what_is_added_are_those_of_the_decoded_values(codec: Codec, length: int) -> None:
    x, total, share = payload(length, length), payload(length, 1), 0.3
    x[::7], x[1::9] = -0.0, 1e-40
    left, kept = torch.full_like(x, torch.nan), x.clone()
    encoded = codec.encode(x, None, left)
    decoded = codec.decode(encoded, torch.empty_like(x))
    assert torch.equal(encoded, codec.encode(x)) and torch.equal(bits(x), bits(kept))
    if not codec.exact:
        assert torch.equal(bits(left), bits(x - decoded))
    assert torch.equal(left, x - decoded)
    expected = total + decoded * share
    codec.add(encoded, share, total)
    assert torch.equal(bits(total), bits(expected))


def test_top_k_keeps_the_first_of_equal_magnitudes() -> None:
    x = torch.zeros(2 * 4096)
    x[10:4000:10], x[4090] = torch.tensor([1.0, -1.0, 1.0] * 133), 2.0
    out = roundtrip(TopK(0.01, 8), x, torch.empty_like(x))
    assert out.nonzero().flatten().tolist() == [*range(10, 410, 10), 4090]
    assert torch.equal(out[out != 0], x[out != 0])


def test_the_magnitudes_of_fp4_are_seven_powers_of_two_and_zero() -> None:
    x = torch.linspace(-3, 3, 255)
    out = FP4().decode(FP4().encode(x), torch.empty(255))
    assert sorted(set(out.abs().tolist())) == [0.0, *(3 * 2.0**e for e in range(-6, 1))]


@by_name(CODECS)
def test_a_piece_from_a_whole_block_on_has_the_bytes_that_it_has_in_the_whole(codec: Codec) -> None:
    x = payload(5 * 4096 + 77, 0)
    whole = codec.encode(x)
    for first, last in [(0, 1), (1, 3), (2, None)]:
        start = first * codec.block
        piece = x[start : None if last is None else last * codec.block]
        offset = codec.encoded_bytes(start)
        assert torch.equal(codec.encode(piece), whole[offset : offset + codec.encoded_bytes(len(piece))])


@by_name(CODECS)
@pytest.mark.parametrize("length", [1, 255, 4096, 4099])
def test_bytes_are_decoded_from_any_address(codec: Codec, length: int) -> None:
    x = payload(length, 3)
    encoded = codec.encode(x)
    expected = codec.decode(encoded, torch.empty_like(x))
    for offset in (1, 2, 3):
        odd = torch.zeros(offset + len(encoded), dtype=torch.uint8)
        odd[offset:] = encoded
        assert torch.equal(codec.decode(odd[offset:], torch.empty_like(x)), expected)


@by_name(CODECS)
@pytest.mark.parametrize("length", [0, 1, 256, 5000])
def test_zero_bytes_are_zeros(codec: Codec, length: int) -> None:
    encoded = torch.zeros(codec.encoded_bytes(length), dtype=torch.uint8)
    assert codec.decode(encoded, torch.ones(length)).tolist() == [0.0] * length


@by_name(CODECS)
def test_a_long_payload_in_parts_is_the_payload_and_may_be_its_own_result(codec: Codec) -> None:
    x = payload((1 << 20) + 4500, 4)
    expected = codec.decode(codec.encode(x), torch.empty_like(x))
    kept = x.clone()
    assert torch.equal(roundtrip(codec, x, torch.empty_like(x)), expected)
    assert torch.equal(x, kept)
    assert torch.equal(roundtrip(codec, x, x), expected)


@pytest.mark.parametrize(
    ("codec", "times"), [(FP32(), 1), (BF16(), 2), (Int8(), 3.93), (FP4(), 7.5), (TopK(), 74), (TopK(0.01, 4), 190)]
)
def test_bytes_are_so_many_times_fewer_than_those_of_fp32(codec: Codec, times: float) -> None:
    assert 4_000_000 / codec.encoded_bytes(1_000_000) >= times


@pytest.mark.gpu
@by_name(CODECS)
def test_a_gpu_decodes_what_the_cpu_encoded_to_the_same_bits_and_the_other_way_round(codec: Codec) -> None:
    x = payload(3 * 4096 + 77, 5)
    x[4096:8192] *= 1e-38
    here, there = codec.encode(x), codec.encode(x.cuda())
    for encoded in (here, there.cpu()):
        on_cpu = codec.decode(encoded, torch.empty_like(x))
        on_gpu = codec.decode(encoded.cuda(), torch.empty_like(x, device="cuda"))
        assert torch.equal(on_cpu.view(torch.int32), on_gpu.cpu().view(torch.int32))
