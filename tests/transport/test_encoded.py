"""The weighted mean of encoded payloads: equal to plain loops, over threads, over Gloo, and when members fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from ftopt.codecs import BF16, FP4, FP32, Codec, Int8, TopK
from ftopt.transport import local
from ftopt.transport.encoded import Buffers, EncodedMean, sent_bytes, spans
from ftopt.transport.gloo import GlooTransport
from ftopt.transport.interface import SumNotFinite
from ftopt.transport.local import LocalTransport
from ftopt.transport.staging import staging_for
from ftopt.transport.store import PeerLost
from tests.reference.codecs import mean_encoded

from .helpers import DictOps, Late, TcpOps, in_threads, members, survivors_of_a_kill, tcp_store

CODECS: list[Codec] = [FP32(), BF16(), Int8(), FP4(), TopK(0.05, 3), TopK(0.3, 2)]
SHARES = {1: [1.0], 2: [0.3, 0.7], 3: [0.25, 0.0, 0.75], 4: [0.1, 0.2, 0.3, 0.4]}
SOON_S = 60.0
NEVER_S = 150.0


def payloads(size: int, numel: int) -> list[Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * (rank + 1) for rank in range(size)]


def by_name(codecs: list[Codec]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("codec", codecs, ids=lambda codec: codec.name)


@pytest.mark.parametrize("block", [1, 3, 256])
@pytest.mark.parametrize("numel", [0, 1, 2, 255, 256, 1000, 5000])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_spans_are_whole_blocks_nearly_alike_and_leave_nothing_out(numel: int, size: int, block: int) -> None:
    got = spans(numel, size, block)
    assert got[0][0] == 0 and got[-1][1] == numel
    assert [start for start, _ in got[1:]] == [stop for _, stop in got[:-1]]
    assert all(start % block == 0 or start == numel for start, _ in got)
    blocks = [-(-(stop - start) // block) for start, stop in got]
    assert max(blocks) - min(blocks) <= 1


staged = pytest.mark.parametrize("staging", [staging_for, Late], ids=["in place", "staged"])


def means(transport: Any, flats: Sequence[Tensor], codec: Codec) -> list[tuple[Tensor, int]]:
    """What each member gets, and how many bytes it has sent for that. In threads."""
    size, ops = len(flats), DictOps()
    collectives = [transport.connect(key="a", rank=rank, size=size, ops=ops) for rank in range(size)]

    def work(rank: int) -> tuple[Tensor, int]:
        collective, flat = collectives[rank], flats[rank].clone()
        collective.mean_encoded_(torch.ones_like(flat), codec, SHARES[size])  # what it leaves behind would show
        before = collective.sent_bytes
        collective.mean_encoded_(flat, codec, SHARES[size])
        return flat, collective.sent_bytes - before

    got = in_threads(size, work)
    assert sum(c.received_bytes for c in collectives) == sum(c.sent_bytes for c in collectives)
    for collective in collectives:  # not before: in one process, closing one ends the others' connections
        collective.close()
    return got


@by_name(CODECS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [0, 1, 300, 30_001])
@pytest.mark.parametrize("piece", [1000, 1 << 17])
def test_threads_get_what_plain_loops_get_bit_for_bit(
    codec: Codec, size: int, numel: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_PIECE", piece)
    flats = payloads(size, numel)
    check(means(LocalTransport(), flats, codec), flats, codec)


@pytest.mark.long
@by_name(CODECS)
@pytest.mark.parametrize(
    ("size", "numel", "piece_bytes"), [(2, 30_001, 1000), (3, 5000, 1 << 20), (4, 300, 100), (2, 1, 8), (3, 0, 8)]
)
@staged
def test_gloo_gets_what_plain_loops_get_bit_for_bit(
    codec: Codec, size: int, numel: int, piece_bytes: int, staging: Any
) -> None:
    flats = payloads(size, numel)
    transport = GlooTransport("127.0.0.1", NEVER_S, piece_bytes=piece_bytes, staging=staging)
    check(means(transport, flats, codec), flats, codec)


@pytest.mark.parametrize("transport", ["local", "gloo"])
@pytest.mark.parametrize("shares", [[0.3, 0.7], [1 / 3] * 3, [0.0, 0.1, 0.2, 0.3, 0.4], [1 / 6] * 6, [1 / 7] * 7])
def test_the_mean_of_equal_values_is_that_value_bit_for_bit(shares: list[float], transport: str) -> None:
    size, ops = len(shares), DictOps()
    flat = torch.randn(3001).mul_(torch.logspace(-44, 37, 3001))
    flat[7], flat[8] = -0.0, 0.0
    made: Any = LocalTransport() if transport == "local" else GlooTransport("127.0.0.1", NEVER_S)
    collectives = [made.connect(key="a", rank=rank, size=size, ops=ops) for rank in range(size)]

    def work(rank: int) -> Tensor:
        mine = flat.clone()
        collectives[rank].mean_encoded_(mine, FP32(), shares)
        return mine

    got = in_threads(size, work)
    for collective in collectives:
        collective.close()
    assert all(torch.equal(mine.view(torch.int32), flat.view(torch.int32)) for mine in got)


@pytest.mark.parametrize("transport", ["local", "gloo"])
@by_name([BF16(), FP4()])
def test_what_is_told_to_be_there_is_the_mean_and_may_be_changed(codec: Codec, transport: str) -> None:
    size, numel = 3, 30_001
    flats, told, ops = payloads(size, numel), list[list[tuple[int, int]]]([[] for _ in range(size)]), DictOps()
    (expected, _), *_ = means(LocalTransport(), flats, codec)
    made: Any = LocalTransport() if transport == "local" else GlooTransport("127.0.0.1", NEVER_S, piece_bytes=1000)
    collectives = [made.connect(key="a", rank=rank, size=size, ops=ops) for rank in range(size)]

    def work(rank: int) -> Tensor:
        flat = flats[rank].clone()

        def summed(start: int, stop: int) -> None:
            told[rank].append((start, stop))
            assert torch.equal(flat[start:stop], expected[start:stop])
            flat[start:stop].neg_()

        collectives[rank].mean_encoded_(flat, codec, SHARES[size], summed=summed)
        return flat

    for rank, flat in enumerate(in_threads(size, work)):
        places = sorted(told[rank])
        assert places and all(stop <= start for (_, stop), (start, _) in pairwise(places))
        changed = expected.clone()
        for start, stop in places:
            changed[start:stop].neg_()
        assert torch.equal(flat, changed)
        assert sum(stop - start for start, stop in places) < numel, "there is no use in waiting for the last ones"
    for collective in collectives:
        collective.close()


@pytest.mark.gpu
@by_name(CODECS)
@pytest.mark.parametrize("transport", ["local", "gloo"])
@pytest.mark.parametrize(("size", "piece_bytes"), [(2, 1000), (3, 1 << 20)])
def test_a_payload_on_a_gpu_has_the_mean_of_the_cpu_bit_for_bit(
    codec: Codec, transport: str, size: int, piece_bytes: int
) -> None:
    flats = payloads(size, 30_001)
    made: Any = LocalTransport()
    if transport == "gloo":
        made = GlooTransport("127.0.0.1", NEVER_S, piece_bytes=piece_bytes)
    got = means(made, [flat.cuda() for flat in flats], codec)
    check([(flat.cpu(), sent) for flat, sent in got], flats, codec)


def check(got: list[tuple[Tensor, int]], flats: Sequence[Tensor], codec: Codec) -> None:
    size, numel = len(flats), flats[0].numel()
    expected = mean_encoded(flats, codec, SHARES[size])
    for flat, _ in got:
        assert torch.equal(flat.view(torch.int32), expected.view(torch.int32))
    assert [sent for _, sent in got] == counts(numel, codec, size)


def test_no_member_sends_its_own_part_to_itself() -> None:
    buffers, shares = Buffers(torch.device("cpu")), [0.25, 0.0, 0.75]
    for rank, share in enumerate(shares):
        sums = EncodedMean(
            payloads(3, 3 * 4096)[rank],
            BF16(),
            shares,
            rank=rank,
            piece_bytes=1 << 20,
            owed=None,
            carry=None,
            buffers=buffers,
            summed=None,
        )
        first = sums.offer(0)
        assert not first.sent_sizes[rank] and not first.received_sizes[rank]
        assert first.own.numel() == (2 * 4096 if share else 0)
        first.received.zero_()
        second = sums.add_up(0, first)
        assert not second.sent_sizes[rank] and second.own.data_ptr() == second.sent.data_ptr()
        assert [exchange.sent.numel() for exchange in (first, second)] == [4 * 4096 if share else 0, 4 * 4096]


def test_a_buffer_is_the_smallest_that_is_large_enough() -> None:
    buffers = Buffers(torch.device("cpu"))
    large, small = buffers.take(300), buffers.take(200)
    places = large.data_ptr(), small.data_ptr()
    buffers.give(large, small)
    small, large = buffers.take(150), buffers.take(300)
    assert (large.data_ptr(), small.data_ptr()) == places


def counts(numel: int, codec: Codec, size: int) -> list[int]:
    return [sent_bytes(numel, codec, SHARES[size], rank=rank) if size > 1 else 0 for rank in range(size)]


def rounds(transport: Any, flats: Sequence[Tensor], codec: Codec, sizes: Sequence[int]) -> list[list[Tensor]]:
    """The means of many rounds in which the first so many members offer the same again; none loses what it owes."""
    owed: list[Any] = [(0, torch.empty(0))] * len(flats)
    means = []
    for number, size in enumerate(sizes):
        ops = DictOps()
        connected = [transport.connect(key=f"round {number}", rank=r, size=size, ops=ops) for r in range(size)]

        def work(rank: int, connected: list[Any] = connected, size: int = size) -> Tensor:
            flat, before = flats[rank].clone(), owed[rank][1].clone()
            after = connected[rank].mean_encoded_(flat, codec, [1 / size] * size, owed[rank])
            assert torch.equal(owed[rank][1], before), "an attempt that fails must find it as it was"
            owed[rank] = after
            return flat

        means.append(in_threads(size, work))
        for collective in connected:
            collective.close()
    return means


@pytest.mark.long
@by_name([BF16(), Int8(), FP4(), TopK(0.3, 2)])
@pytest.mark.parametrize("sizes", [[3] * 8, [3, 2, 1, 3, 3, 2]], ids=["a steady quorum", "members come and go"])
@staged
def test_gloo_and_threads_owe_the_same_bits(codec: Codec, sizes: list[int], staging: Any) -> None:
    flats = payloads(3, 5000)
    expected = rounds(LocalTransport(), flats, codec, sizes)
    got = rounds(GlooTransport("127.0.0.1", NEVER_S, piece_bytes=1000, staging=staging), flats, codec, sizes)
    for ours, theirs in zip(got, expected, strict=True):
        assert all(torch.equal(flat.view(torch.int32), theirs[0].view(torch.int32)) for flat in [*ours, *theirs])


def test_what_the_sums_codec_makes_zero_moves_all_the_same() -> None:
    """0.005 beside 1 is zero in fp4. Both arrive exactly in the first hop here: only the sum's rounding is at stake."""
    flat = torch.zeros(512)
    flat[0], flat[300] = 1.0, 1.0
    hidden = torch.zeros(512)
    hidden[1::2] = 2.0**-8
    means = rounds(LocalTransport(), [flat, hidden], FP4(), [2] * 64)
    moved = torch.stack([of_round[0] for of_round in means]).double().sum(0)
    torch.testing.assert_close(moved, 32.0 * (flat + hidden).double(), atol=1 / 64, rtol=0)


def test_fp4_sends_over_7_times_fewer_bytes_than_fp32_in_both_hops_together() -> None:
    fp32, fp4 = (sent_bytes(1_000_000, codec, [0.25] * 4, rank=0) for codec in (FP32(), FP4()))
    assert fp32 == 2 * 3 * 1_000_000
    assert fp32 / fp4 > 7.8


@pytest.mark.parametrize("transport", ["local", "gloo"])
def test_a_member_of_share_zero_may_hold_anything(transport: str) -> None:
    flats = payloads(3, 5000)
    expected = mean_encoded(flats, FP4(), SHARES[3])
    flats[1].fill_(float("nan"))
    made = LocalTransport() if transport == "local" else GlooTransport("127.0.0.1", NEVER_S)
    got = means(made, flats, FP4())
    assert all(torch.equal(flat, expected) for flat, _ in got)


@pytest.mark.parametrize("transport", ["local", "gloo"])
def test_a_payload_that_is_not_finite_ends_the_mean_for_all(transport: str) -> None:
    made: Any = LocalTransport() if transport == "local" else GlooTransport("127.0.0.1", NEVER_S)
    ops = DictOps()

    def work(rank: int) -> None:
        collective = made.connect(key="a", rank=rank, size=2, ops=ops)
        collective.exchange([rank])
        flat = torch.full((1000,), float("inf") if rank else 1.0)
        collective.mean_encoded_(flat, FP4(), [0.5, 0.5])

    before_s = time.monotonic()
    other, corrupted = in_threads(2, work)
    assert isinstance(corrupted, FloatingPointError)
    assert isinstance(other, ConnectionError)
    assert time.monotonic() - before_s < SOON_S


@pytest.mark.parametrize("transport", ["local", "gloo"])
@pytest.mark.parametrize(("value", "named"), [(float("nan"), [1]), (None, [])], ids=["a payload", "what is owed"])
def test_who_adds_up_names_the_payload_that_is_not_finite_and_never_itself(
    transport: str, value: float | None, named: list[int]
) -> None:
    """An exact codec passes NaN on to whoever sums it up; the codec of the sum refuses it."""
    made: Any = LocalTransport() if transport == "local" else GlooTransport("127.0.0.1", NEVER_S)
    ops = DictOps()

    def work(rank: int) -> None:
        collective = made.connect(key="a", rank=rank, size=2, ops=ops)
        collective.exchange([rank])
        flat = torch.full((1024,), value if rank and value is not None else 1.0)
        owed = None if value is not None else (0, torch.full((1024,), float("inf")))
        collective.mean_encoded_(flat, _Values(), [0.5, 0.5], owed)

    errors = [error for error in in_threads(2, work) if isinstance(error, SumNotFinite)]
    assert errors and all(error.ranks == named for error in errors)


class _Values(FP32):
    """Sends values as they are, and their sum by a codec that refuses some."""

    block = FP4().block

    def for_sum(self, payloads: int) -> Codec:  # type: ignore[override]
        return FP4()


def test_a_peer_that_brings_nothing_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = DictOps()
    transport = GlooTransport("127.0.0.1", NEVER_S)
    idle = transport.connect(key="a", rank=0, size=2, ops=ops)
    collective = transport.connect(key="a", rank=1, size=2, ops=ops)
    collective.open()
    monkeypatch.setattr(collective._group, "_timeout_s", 0.3)  # from now on: connecting may take longer
    with pytest.raises(TimeoutError, match="no piece"):
        collective.mean_encoded_(torch.zeros(1000), FP4(), [0.5, 0.5])
    idle.close()


@pytest.mark.parametrize("transport", ["local", "gloo"])
def test_stop_ends_a_mean_under_way(transport: str) -> None:
    made: Any = LocalTransport() if transport == "local" else GlooTransport("127.0.0.1", NEVER_S)
    ops = DictOps()
    idle, collective = (made.connect(key="a", rank=rank, size=2, ops=ops) for rank in range(2))
    collective.open()
    threading.Timer(0.05, collective.stop).start()
    before_s = time.monotonic()
    with pytest.raises(InterruptedError):
        collective.mean_encoded_(torch.zeros(1000), FP4(), [0.5, 0.5])
    assert time.monotonic() - before_s < SOON_S
    idle.close()


def mean_until_it_fails(pipe: Connection, rank: int, size: int, port: int) -> None:
    """Means on and on; then tells how it failed, and meets those that the test names."""
    transport, ops = GlooTransport("127.0.0.1", NEVER_S, piece_bytes=1 << 16), TcpOps(port)
    collective = transport.connect(key="first", rank=rank, size=size, ops=ops)
    collective.open()
    pipe.send(os.getpid())
    flat = torch.ones(2_000_000)
    try:
        while True:
            collective.mean_encoded_(flat, FP4(), [1 / size] * size)
    except ConnectionError as error:
        pipe.send(type(error).__name__)
    rank, size = pipe.recv()
    collective = transport.connect(key="second", rank=rank, size=size, ops=ops)
    flat = torch.full((1000,), float(rank))
    collective.mean_encoded_(flat, FP4(), [1 / size] * size)
    pipe.send(flat.tolist())
    collective.close()


@pytest.mark.parametrize("count", [2, 4])
def test_a_killed_member_is_noticed_by_all_and_the_survivors_meet_again(count: int) -> None:
    failures, results = survivors_of_a_kill(count, mean_until_it_fails, SOON_S)
    assert set(failures) == {PeerLost.__name__}
    assert results == [[(count - 2) / 2] * 1000] * (count - 1)


def stop_while_a_peer_hangs(pipe: Connection, rank: int, size: int, port: int) -> None:
    collective = GlooTransport("127.0.0.1", NEVER_S).connect(key="a", rank=rank, size=size, ops=TcpOps(port))
    collective.open()
    pipe.send("open")
    pipe.recv()  # to rank 1 it never comes
    stopped_s = [0.0]

    def stop() -> None:
        stopped_s[0] = time.monotonic()
        collective.stop()

    threading.Timer(0.1, stop).start()
    try:
        collective.mean_encoded_(torch.zeros(4_000_000), Int8(), [0.5, 0.5])
    except InterruptedError:
        pipe.send(time.monotonic() - stopped_s[0])
    collective.close()


def test_a_hung_peer_blocks_neither_stop_nor_the_exit() -> None:
    with tcp_store() as port, members(2, stop_while_a_peer_hangs, port) as started:
        first, second = started
        assert [first.receive(), second.receive()] == ["open", "open"]
        pid = second.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        first.pipe.send("go")
        assert first.receive() < SOON_S
        first.process.join(60.0)
        assert first.process.exitcode == 0
