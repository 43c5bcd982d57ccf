from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ftopt.codecs import BF16, FP4, FP32, Codec, Int8, TopK
from ftopt.step.outer.error_feedback import Feedback
from ftopt.transport.gloo import GlooTransport
from ftopt.transport.local import LocalTransport, roundtrip
from tests.reference.codecs import through
from tests.transport.helpers import DictOps, in_threads

CODECS: list[Codec] = [FP32(), BF16(), Int8(), FP4(), TopK(0.05, 4), TopK(0.03, 2)]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
N = 5000


def offered(residual: Tensor, delta: Tensor, codec: Codec, beta: float) -> tuple[Tensor, Tensor]:
    """What goes to the reduction in the place of ``delta``, and what it leaves out of that."""
    payload, left = delta.clone(), torch.full_like(delta, 7.0)
    feedback = Feedback(codec, residual, beta, left)
    for start in range(0, N, 2048):  # whole blocks of some codecs, not of all: those get it in one
        part = payload[start : start + 2048] if not isinstance(codec, TopK) else payload
        feedback.encode(part, start, torch.empty(codec.encoded_bytes(part.numel()), dtype=torch.uint8))
        if isinstance(codec, TopK):
            break
    return delta + residual * beta, left


def deltas(count: int, seed: int = 0) -> list[Tensor]:
    """Outer gradients that have something in common, as they do."""
    chance = torch.Generator().manual_seed(seed)
    common = torch.randn(N, generator=chance)
    return [common + torch.randn(N, generator=chance) for _ in range(count)]


def rounds(
    codec: Codec, given: list[Tensor], beta: float = 1.0, *, first: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """What is sent in each round, and the last residual; ``first``: the one of the rounds before."""
    residual, sent = torch.zeros(N) if first is None else first, []
    for delta in given:
        payload, residual = offered(residual, delta, codec, beta)
        sent.append(roundtrip(codec, payload, torch.empty(N)))
    return sent, residual


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).double().sum(0)


@by_codec
def test_the_sum_of_what_was_sent_is_the_sum_of_the_deltas_but_for_the_last_residual(codec: Codec) -> None:
    given = deltas(40)
    sent, residual = rounds(codec, given)
    torch.testing.assert_close(total(given) - total(sent), residual.double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("codec", "factor"), [(FP32(), 0), (BF16(), 1 / 255), (Int8(), 1 / 252), (FP4(), 0.26 / 0.74)], ids=str
)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_the_residual_stays_within_one_steps_error_however_many_rounds(codec: Codec, factor: float, count: int) -> None:
    given = deltas(count)
    _, residual = rounds(codec, given)
    for block in range(0, N, 256):
        largest = max(float(delta[block : block + 256].abs().max()) for delta in given)
        assert float(residual[block : block + 256].abs().max()) <= factor * largest


@pytest.mark.parametrize("codec", [FP4(), TopK(0.03, 2)], ids=lambda codec: codec.name)
def test_without_it_the_error_grows_on_and_on(codec: Codec) -> None:
    given = deltas(160)
    _, half = rounds(codec, given[:80])
    _, residual = rounds(codec, given[80:], first=half)
    bare = total(given) - total([roundtrip(codec, delta, torch.empty(N)) for delta in given])
    assert float(bare.norm()) > 5 * float(residual.norm())
    assert float(residual.norm()) < 1.2 * float(half.norm())


@pytest.mark.parametrize("beta", [0.0, 0.9, 1.0])
@by_codec
def test_it_is_the_papers_loop(codec: Codec, beta: float) -> None:
    given = deltas(3)
    _, got = rounds(codec, given, beta)
    e = torch.zeros(N)
    for delta in given:
        e = beta * e + delta
        e = e - torch.tensor(through(codec.name, e.tolist()))
    assert torch.equal(got, e)


@by_codec
def test_a_failed_attempt_finds_the_residual_as_it_was(codec: Codec) -> None:
    (delta,), residual = deltas(1), deltas(1, seed=1)[0]
    kept = residual.clone()
    first = offered(residual, delta, codec, 0.9)
    assert torch.equal(residual, kept)
    again = offered(residual, delta, codec, 0.9)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@by_codec
@pytest.mark.parametrize("transport", [LocalTransport, lambda: GlooTransport("127.0.0.1", 60.0, piece_bytes=3000)])
def test_the_residual_is_taken_from_what_the_reduction_sends(codec: Codec, transport: Callable[[], Any]) -> None:
    payload, residual = deltas(1)[0], deltas(1, seed=1)[0]
    expected, left_out = offered(residual, payload, codec, 0.9)
    there, ops = transport(), DictOps()
    members = [there.connect(key="a", rank=rank, size=2, ops=ops) for rank in range(2)]

    def work(rank: int) -> tuple[Tensor, Tensor]:
        flat, left = (payload.clone() if rank else torch.zeros(N)), torch.zeros(N)
        carry = Feedback(codec, residual, 0.9, left)
        members[rank].mean_encoded_(flat, codec, [0.0, 1.0], None, carry)
        return flat, left

    got = in_threads(2, work)
    for member in members:
        member.close()
    (_, untouched), (mean, left) = got
    assert not untouched.any()
    assert torch.equal(left, left_out)
    if isinstance(codec, BF16 | FP4):  # these lose nothing the second time: the mean of one shows what it sent
        assert torch.equal(expected - mean, left_out)


def test_one_member_alone_pays_all_that_it_carries() -> None:
    payload, residual, left = deltas(1)[0], deltas(1, seed=1)[0], torch.ones(N)
    flat = payload.clone()
    alone = LocalTransport().connect(key="a", rank=0, size=1)
    alone.mean_encoded_(flat, FP4(), [1.0], None, Feedback(FP4(), residual, 1.0, left))
    assert torch.equal(flat, payload + residual) and not left.any()


@pytest.mark.parametrize("codec", [BF16(), FP4()], ids=lambda codec: codec.name)
def test_what_a_member_owes_lies_in_the_memory_of_its_step(codec: Codec) -> None:
    there, ops, made = GlooTransport("127.0.0.1", 60.0), DictOps(), list[Tensor]()
    members = [there.connect(key="a", rank=rank, size=2, ops=ops) for rank in range(2)]

    def room(owed: Tensor) -> Tensor:
        made.append(torch.full_like(owed, torch.nan))
        return made[-1]

    def work(rank: int) -> Any:
        carry = Feedback(codec, None, 1.0, torch.zeros(N), room)
        return members[rank].mean_encoded_(deltas(2)[rank], codec, [0.5, 0.5], (0, torch.empty(0)), carry)

    owed = [values for _, values in in_threads(2, work)]
    for member in members:
        member.close()
    assert {values.data_ptr() for values in owed} == {values.data_ptr() for values in made}
    assert all(bool(values.isfinite().all()) for values in owed)
