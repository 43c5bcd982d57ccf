"""The codecs' kernels give the bits of torch's operations: bytes, values, what is left out, what is added."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ftopt.codecs import BF16, FP4, Codec, Int8, TopK
from ftopt.codecs.blockwise import KERNELS, Blockwise, Kernels
from ftopt.codecs.named import difference, prepare_kernels
from ftopt.codecs.top_k import TopKSum
from ftopt.step.outer.error_feedback import Feedback
from ftopt.transport.gloo import GlooTransport
from ftopt.transport.interface import Owed
from tests.transport.helpers import DictOps, in_threads

pytest.importorskip("numba")

CODECS: list[Blockwise] = [
    BF16(),
    Int8(),
    FP4(),
    TopK(),
    TopK(0.01, 4),
    TopK(1e-9, 8),
    TopK(0.37, 5),
    TopK(1.0, 8),
    TopKSum(0.05, 8, payloads=3),
]
LENGTHS = [0, 1, 2, 3, 255, 256, 257, 511, 777, 4095, 4096, 4097, 9001, (1 << 18) + 4099]
LARGEST = torch.finfo(torch.float32).max
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, -1e-39, 1.1754944e-38, 2.0**-133, 0.25, -3.0, 3.37e38, 3.38e38, -LARGEST]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.name} {getattr(codec, 'payloads', '')}")


@cache  # the tests of this file may run in several parts
def _loaded() -> Kernels:
    thread = prepare_kernels(torch.device("cpu"), 1 << 20)
    assert thread is not None
    thread.join()
    found, KERNELS._kernels = KERNELS._kernels, None  # the tests of other files run without
    assert found is not None
    return found


@pytest.fixture(scope="module")
def loaded() -> Kernels:
    return _loaded()


def bits(flat: Tensor) -> Tensor:
    return flat.view(torch.int32)


def everything(codec: Blockwise, kernels: Kernels | None, x: Tensor, offset: int = 0) -> list[Tensor]:
    """Bytes that begin at this address, what they leave out, what is decoded of them, and a share of it added."""
    encoded = torch.full((offset + codec.encoded_bytes(len(x)),), 7, dtype=torch.uint8)[offset:]
    left, decoded, total = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan), x.abs().clamp(max=1e30)
    assert codec._encode(kernels, x, encoded, None)
    alone = encoded.clone()
    assert codec._encode(kernels, x, encoded.fill_(9), left) and torch.equal(encoded, alone)
    codec._decode(kernels, encoded, decoded, None)
    codec._decode(kernels, encoded, total, 0.3)
    offered, more, of_both, rest = x / 2, x.flip(0) / 2, torch.empty_like(encoded), torch.empty_like(x)
    assert codec._encode(kernels, offered, of_both, rest, more)
    return [encoded, *(bits(flat) for flat in (left, decoded, total)), of_both, bits(rest)]


def check(codec: Blockwise, loaded: Kernels, x: Tensor, offset: int = 0) -> None:
    kept = x.clone()
    found, expected = everything(codec, loaded, x, offset), everything(codec, None, x, offset)
    names = ("bytes", "left out", "decoded", "added", "bytes with more", "left out of them")
    for what, a, b in zip(names, found, expected, strict=True):
        assert torch.equal(a, b), (what, int((a != b).sum()))
    assert torch.equal(bits(x), bits(kept))


@by_codec
@pytest.mark.parametrize("length", LENGTHS)
def test_payloads_of_any_length_from_any_address(codec: Blockwise, length: int, loaded: Kernels) -> None:
    chance = torch.Generator().manual_seed(length)
    x = torch.randn(length, generator=chance) * torch.exp(4 * torch.randn(length, generator=chance))
    for offset in range(4 if length < 10_000 else 1):
        check(codec, loaded, x, offset)


@by_codec
@pytest.mark.parametrize("value", SPECIAL)
def test_special_values_alone_and_among_others(codec: Blockwise, value: float, loaded: Kernels) -> None:
    for length in (1, 255, 4099):
        check(codec, loaded, torch.full((length,), value))
        x = torch.randn(length, generator=torch.Generator().manual_seed(length))
        x[:: max(1, length // 9)] = value
        check(codec, loaded, x)
        check(codec, loaded, x * 1e-38)


@by_codec
@pytest.mark.parametrize("values", [2, 9, 300])
def test_of_equal_magnitudes_the_same_ones_are_kept(codec: Blockwise, values: int, loaded: Kernels) -> None:
    chance = torch.Generator().manual_seed(values)
    check(codec, loaded, torch.randint(-values, values + 1, (3 * 4096 + 77,), generator=chance).float())


@pytest.mark.parametrize("codec", [BF16(), Int8(), FP4(), TopK(0.05, 2), TopK(0.3, 8)], ids=lambda codec: codec.name)
@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    repeats=st.sampled_from([1, 9, 150]),
)
def test_any_values(codec: Blockwise, values: list[float], repeats: int, loaded: Kernels) -> None:
    check(codec, loaded, torch.tensor(values * repeats, dtype=torch.float32))


@pytest.mark.long
@by_codec
def test_any_bits(codec: Blockwise, loaded: Kernels) -> None:
    for seed in range(20):
        chance = torch.Generator().manual_seed(seed)
        x = torch.randint(-(2**31), 2**31, (50_001,), generator=chance).int().view(torch.float32)
        x[~x.isfinite()] = 0
        check(codec, loaded, x)
        check(codec, loaded, torch.where(x.abs() < 1e-38, x, 0))


@by_codec
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(
    codec: Blockwise, value: float, loaded: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernels in (loaded, None):
        monkeypatch.setattr(KERNELS, "ready", lambda kernels=kernels: kernels)
        for place in (0, 5000, 8191, 8195):
            x = torch.randn(8196)
            x[place] = value
            with pytest.raises(FloatingPointError, match=rf"codec {codec.name} cannot encode NaN or Inf"):
                codec.encode(x, None, torch.empty_like(x))


@pytest.mark.parametrize("codec", [BF16(), Int8(), FP4(), TopK(1.0, 8)], ids=lambda codec: codec.name)
def test_any_bytes_are_decoded_to_the_same_bits(codec: Blockwise, loaded: Kernels) -> None:
    length = 4096 * 3
    chance = torch.Generator().manual_seed(0)
    encoded = torch.randint(0, 256, (codec.encoded_bytes(length),), generator=chance, dtype=torch.uint8)
    if isinstance(codec, TopK):  # each place once, or their order decides
        words = torch.arange(4096) << 8 | torch.randint(0, 256, (4096,), generator=chance)
        five = (words[::2] | words[1::2] << 20).view(-1, 1) >> torch.arange(0, 40, 8)
        encoded.view(3, -1)[:, 4:] = (five & 255).flatten().to(torch.uint8)
    found = []
    for kernels in (loaded, None):
        out = torch.empty(length)
        codec._decode(kernels, encoded, out, None)
        found.append(torch.where(out.isnan(), 0, bits(out)))
    assert torch.equal(*found)


def test_a_place_beyond_a_short_block_is_refused_and_nothing_is_written_there(loaded: Kernels) -> None:
    codec = TopK(0.03, 2)
    encoded = torch.full((codec.encoded_bytes(300),), 255, dtype=torch.uint8)
    room = torch.zeros(4096)
    for kernels, share in ((loaded, None), (loaded, 0.5), (None, None), (None, 0.5)):
        with pytest.raises(RuntimeError, match=r"has not encoded these bytes|out of bounds"):
            codec._decode(kernels, encoded, room[:300], share)
    assert not room.any()


@pytest.mark.parametrize("beta", [0.9, 1.0])
@by_codec
def test_error_feedback_has_the_same_bits(
    codec: Codec, beta: float, loaded: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kernels in (loaded, None):
        monkeypatch.setattr(KERNELS, "ready", lambda kernels=kernels: kernels)
        chance, residual = torch.Generator().manual_seed(0), torch.zeros(9001)
        for _ in range(3):
            part, left = torch.randn(9001, generator=chance), torch.empty(9001)
            out = torch.empty(codec.encoded_bytes(9001), dtype=torch.uint8)
            Feedback(codec, residual, beta, left).encode(part, 0, out)
            residual = left
        found.append([out, bits(residual)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@by_codec
def test_a_member_with_kernels_and_one_without_agree(
    codec: Codec, loaded: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel, lock = 30_001, threading.Lock()

    def means(using: Sequence[bool]) -> list[list[Tensor]]:
        """The means of three rounds, and what is left out of the last one, for each of two members."""
        there, ops, ranks = GlooTransport("127.0.0.1", 60.0, piece_bytes=20_000), DictOps(), dict[int, int]()
        members = [there.connect(key="a", rank=rank, size=2, ops=ops) for rank in range(2)]

        def ready() -> Kernels | None:
            return loaded if using[ranks[threading.get_ident()]] else None

        def work(rank: int) -> list[Tensor]:
            with lock:
                ranks[threading.get_ident()] = rank
            chance, residual, found = torch.Generator().manual_seed(rank), torch.zeros(numel), list[Tensor]()
            owed: Owed | None = (0, torch.empty(0))
            for _ in range(3):
                flat, left = torch.randn(numel, generator=chance), torch.empty(numel)
                owed = members[rank].mean_encoded_(
                    flat, codec, [0.25, 0.75], owed, Feedback(codec, residual, 0.9, left)
                )
                residual = left
                found.append(flat)
            assert owed is not None
            return [bits(flat) for flat in (*found, residual, owed[1])]

        monkeypatch.setattr(KERNELS, "ready", ready)
        got = in_threads(2, work)
        for member in members:
            member.close()
        return got

    mixed, plain = means([True, False]), means([False, False])
    assert all(torch.equal(a, b) for a, b in zip(mixed[0][:3], mixed[1][:3], strict=True))
    for ours, theirs in zip(mixed, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_tensors_that_kernels_cannot_use_are_left_to_torch(loaded: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "ready", lambda: loaded)
    x = torch.randn(512)
    parameter = torch.nn.Parameter(x.clone())
    encoded = Int8().encode(x)
    assert torch.equal(Int8().encode(parameter), encoded)
    apart = torch.stack([encoded, encoded], 1)[:, 0]
    assert torch.equal(Int8().decode(apart, torch.empty(512)), Int8().decode(encoded, torch.empty(512)))


@pytest.mark.parametrize("codec", [BF16(), Int8(), FP4(), TopK()], ids=lambda codec: codec.name.partition(":")[0])
def test_a_kernel_with_other_bits_is_found(codec: Blockwise, loaded: Kernels) -> None:
    assert difference(loaded) == "" and difference(Kernels(*loaded)) == ""

    def other(flat: Tensor, out: Tensor, left: Tensor, more: Tensor, form: tuple[int, ...]) -> object:
        found = loaded.encode(flat, out, left, more, form)
        if form[0] == codec.kernel:
            left[-1:] += 1
        return found

    assert difference(loaded._replace(encode=other)) == codec.name


def test_small_payloads_and_other_devices_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "_thread", None)
    assert prepare_kernels(torch.device("cpu"), 1000) is None
    assert prepare_kernels(torch.device("meta"), 1 << 30) is None
