from __future__ import annotations

import threading

import pytest
import torch

from ftopt.transport import local
from ftopt.transport.local import LocalTransport

from .helpers import in_threads


@pytest.mark.parametrize("numel", [0, 1, 1001, 2 * local._PIECE + 1])
def test_sums_go_in_rank_order_and_are_bit_equal_on_all_members(numel: int) -> None:
    transport = LocalTransport()
    payloads = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    expected = ((payloads[0] + payloads[1]) + payloads[2]) + payloads[3]

    def work(rank: int) -> torch.Tensor:
        collective = transport.connect(key="a", rank=rank, size=4)
        flat = payloads[rank].clone()
        collective.all_reduce_(flat)
        collective.close()
        return flat

    for got in in_threads(4, work):
        assert torch.equal(got, expected)


def test_many_calls_in_a_row_do_not_mix() -> None:
    transport = LocalTransport()

    def work(rank: int) -> list[float]:
        collective = transport.connect(key="a", rank=rank, size=3)
        sums = []
        for number in range(200):
            flat = torch.full((2,), float(number * (rank + 1)))
            collective.all_reduce_(flat)
            sums.append(flat[1].item())
        collective.close()
        return sums

    assert in_threads(3, work) == [[6.0 * number for number in range(200)]] * 3
    assert not transport._meetings


def test_rows_are_exchanged_in_rank_order() -> None:
    transport = LocalTransport()
    rows = in_threads(3, lambda rank: transport.connect(key="a", rank=rank, size=3).exchange([rank, 2**62]))
    assert rows == [[[0, 2**62], [1, 2**62], [2, 2**62]]] * 3


def test_what_is_told_waits_for_nobody_until_it_is_asked_for() -> None:
    transport = LocalTransport()

    def work(rank: int) -> tuple[list[list[int]], float]:
        collective, flat = transport.connect(key="a", rank=rank, size=3), torch.ones(1)
        collective.tell([rank, 2**62])
        collective.all_reduce_(flat)
        assert collective.told() == collective.told()
        return collective.told(), float(flat)

    assert in_threads(3, work) == [([[0, 2**62], [1, 2**62], [2, 2**62]], 3.0)] * 3


def test_a_member_that_never_comes_is_a_timeout() -> None:
    collective = LocalTransport(timeout_s=0.05).connect(key="a", rank=0, size=2)
    with pytest.raises(TimeoutError, match="2 members"):
        collective.all_reduce_(torch.zeros(1))
    with pytest.raises(InterruptedError):
        collective.open()


@pytest.mark.parametrize("_", range(20))  # the order in which the threads wake differs
def test_a_stopped_member_ends_its_call_and_its_peers_see_it_gone(_: int) -> None:
    transport = LocalTransport()
    collectives = [transport.connect(key="a", rank=rank, size=3) for rank in range(3)]

    def work(rank: int) -> None:
        if rank == 2:
            threading.Timer(0.02, collectives[0].stop).start()
        else:
            collectives[rank].all_reduce_(torch.zeros(4))

    first, second, _ = in_threads(3, work)
    assert isinstance(first, InterruptedError)
    assert isinstance(second, ConnectionError)
    with pytest.raises(InterruptedError):
        collectives[0].exchange([1])
    with pytest.raises(ConnectionError):
        collectives[2].all_reduce_(torch.zeros(4))


def test_a_member_that_closes_after_the_sum_does_not_disturb_the_others() -> None:
    transport = LocalTransport()

    def work(rank: int) -> float:
        collective = transport.connect(key="a", rank=rank, size=5)
        flat = torch.ones(1)
        collective.all_reduce_(flat)
        collective.close()
        return flat.item()

    assert in_threads(5, work) == [5.0] * 5


def test_a_member_that_has_left_a_group_cannot_come_back_to_it() -> None:
    transport = LocalTransport()
    here, _ = (transport.connect(key="a", rank=rank, size=2) for rank in range(2))
    here.close()
    with pytest.raises(ConnectionError, match="rank 0 has left group 'a'"):
        transport.connect(key="a", rank=0, size=2)


def test_a_group_of_one_needs_nobody() -> None:
    collective = LocalTransport(timeout_s=0.01).connect(key="a", rank=0, size=1)
    flat = torch.ones(3)
    collective.open()
    collective.all_reduce_(flat)
    assert flat.tolist() == [1.0] * 3
    assert collective.exchange([7]) == [[7]]
