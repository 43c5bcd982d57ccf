from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ftopt.codecs import BF16, FP4, FP32, Codec, Int8, TopK, roundtrip
from ftopt.optimizer.error_feedback import left_out, offered
from ftopt.transport.local import LocalTransport
from tests.reference.codecs import through
from tests.transport.helpers import in_threads

CODECS: list[Codec] = [FP32(), BF16(), Int8(), FP4(), TopK(0.05, 4), TopK(0.03, 2)]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
N = 5000


def deltas(count: int, seed: int = 0) -> list[Tensor]:
    """Outer gradients that have something in common, as they do."""
    chance = torch.Generator().manual_seed(seed)
    common = torch.randn(N, generator=chance)
    return [common + torch.randn(N, generator=chance) for _ in range(count)]


def rounds(codec: Codec, given: list[Tensor], beta: float = 1.0) -> tuple[list[Tensor], Tensor]:
    """What is sent in each round, and the last residual."""
    residual, sent = torch.zeros(N), []
    for delta in given:
        payload = offered(residual, delta, out=torch.empty(N), beta=beta)
        sent.append(roundtrip(codec, payload, torch.empty(N)))
        residual = left_out(payload, codec, out=torch.empty(N))
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


@pytest.mark.parametrize("codec", [FP4(), TopK(0.05, 4), TopK(0.03, 2)], ids=lambda codec: codec.name)
def test_without_it_the_error_grows_on_and_on(codec: Codec) -> None:
    given = deltas(160)
    _, residual = rounds(codec, given)
    bare = total(given) - total([roundtrip(codec, delta, torch.empty(N)) for delta in given])
    assert float(bare.norm()) > 5 * float(residual.norm())
    half = rounds(codec, given[:80])[1]
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
def test_a_failed_attempt_is_tried_again_with_the_same_payload(codec: Codec) -> None:
    (delta,), residual = deltas(1), deltas(1, seed=1)[0]
    kept = residual.clone(), delta.clone()
    payload = offered(residual, delta, out=torch.empty(N), beta=0.9)
    frozen = payload.clone()
    first = left_out(payload, codec, out=torch.empty(N))
    assert torch.equal(payload, frozen)
    assert torch.equal(first, left_out(payload, codec, out=torch.empty(N)))
    assert torch.equal(residual, kept[0]) and torch.equal(delta, kept[1])
    assert torch.equal(offered(residual, delta, out=delta, beta=0.9), frozen)


@pytest.mark.parametrize("codec", [BF16(), FP4()], ids=lambda codec: codec.name)
def test_the_residual_is_taken_from_what_the_reduction_sends(codec: Codec) -> None:
    """These two lose nothing the second time, so the mean of one contributor shows what it sent."""
    payload, transport = deltas(1)[0], LocalTransport()

    def work(rank: int) -> Tensor:
        flat = payload.clone() if rank else torch.zeros(N)
        transport.connect(key="a", rank=rank, size=2).mean_encoded_(flat, codec, [0.0, 1.0])
        return flat

    for mean in in_threads(2, work):
        assert torch.equal(payload - mean, left_out(payload, codec, out=torch.empty(N)))
