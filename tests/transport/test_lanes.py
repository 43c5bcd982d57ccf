"""Members whose payloads are in slices meet rank to rank, with members of any other number of slices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ftopt.codecs import FP4, FP32, Codec, Int8
from ftopt.transport.gloo import GlooCollective, GlooTransport
from ftopt.transport.lanes import SLICE_BLOCK, Lanes, lanes_of, slices
from ftopt.transport.local import LocalTransport

from .helpers import DictOps, in_threads

NUMEL = 3 * SLICE_BLOCK + 77


@pytest.mark.parametrize("numel", [0, 1, SLICE_BLOCK, SLICE_BLOCK + 1, NUMEL, 10 * SLICE_BLOCK])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_slices_cover_a_payload_in_whole_blocks_and_the_first_is_not_empty(numel: int, parts: int) -> None:
    found = slices(numel, parts)
    assert [stop for _, stop in found[:-1]] == [start for start, _ in found[1:]]
    assert (found[0][0], found[-1][1], len(found)) == (0, numel, parts)
    assert all(start % SLICE_BLOCK == 0 or start == numel for start, _ in found)
    assert numel == 0 or found[0][1] > 0


def test_each_lane_has_one_owner_in_each_member() -> None:
    parts = [2, 1, 4, 3]
    numel = 11 * SLICE_BLOCK + 5
    by_member = [
        [lane for index in range(n) for lane in lanes_of(numel, parts, rank, index)] for rank, n in enumerate(parts)
    ]
    assert all(lanes == by_member[0] for lanes in by_member)
    assert by_member[0][0][0] == 0 and by_member[0][-1][1] == numel


def reduced(
    parts: list[int], payloads: list[Tensor], work: Callable[[Any, Tensor, int, int], Any], attempts: int = 1
) -> list[list[Any]]:
    """What each slice of each member has after ``work(lanes or collective, flat, member, first element)``."""
    ops, numel = DictOps(), payloads[0].numel()
    owners = [(member, index) for member, n in enumerate(parts) for index in range(n)]
    made: list[Any] = []

    def one(number: int) -> list[Any]:
        member, index = owners[number]
        transport = GlooTransport("127.0.0.1", 60.0, piece_bytes=1 << 14)
        transport.parts = parts[member]
        start, stop = slices(numel, parts[member])[index]
        through: Any
        if index:  # told by the member's first rank
            through = transport.lanes(numel, parts, key="0.1", rank=member, ops=ops, index=index)
        else:
            main = transport.connect(key="0.1", rank=member, size=len(parts), ops=ops)
            made.append(main)
            assert main.parts() == parts
            through = main if parts[member] == 1 else main.lanes(numel)
        made.append(through)
        return [work(through, payloads[member][start:stop].clone(), member, start) for _ in range(attempts)]

    found = in_threads(len(owners), one)
    for each in made:
        each.close()
    return [
        [result for (member, _), result in zip(owners, found, strict=True) if member == m] for m in range(len(parts))
    ]


PAYLOADS = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(m)) for m in range(3)]


@pytest.mark.parametrize("parts", [[2, 2], [2, 4], [1, 2], [3, 1], [5, 2]])
def test_a_sum_of_slices_is_the_sum_of_the_whole(parts: list[int]) -> None:
    def work(through: Any, flat: Tensor, member: int, start: int) -> Tensor:
        arrived = torch.zeros_like(flat)

        def summed(a: int, b: int) -> None:
            arrived[a:b] = flat[a:b]

        through.all_reduce_(flat, summed)
        there = arrived != 0
        assert torch.equal(arrived[there], flat[there])
        return flat

    for member in reduced(parts, PAYLOADS[:2], work):
        assert torch.equal(torch.cat([flat for (flat,) in member]), PAYLOADS[0] + PAYLOADS[1])


@pytest.mark.parametrize("codec", [FP32(), Int8(), FP4()])
@pytest.mark.parametrize("parts", [[2, 2, 1], [2, 4, 3]])
def test_an_encoded_mean_of_slices_is_that_of_the_whole_with_what_is_owed(codec: Codec, parts: list[int]) -> None:
    shares = [0.5, 0.3, 0.2]
    plain = LocalTransport(60.0)

    def whole(member: int) -> list[Tensor]:
        collective = plain.connect(key="a", rank=member, size=3)
        owed, got = (0, torch.empty(0)), []
        for _ in range(3):
            flat = PAYLOADS[member].clone()
            owed = collective.mean_encoded_(flat, codec, shares, owed)  # type: ignore[assignment]
            got.append(flat)
        return got

    expected = in_threads(3, whole)[0]
    kept: dict[tuple[int, int], Any] = {}

    def work(through: Any, flat: Tensor, member: int, start: int) -> Tensor:
        owed = kept.get((member, start), (0, torch.empty(0)))
        kept[member, start] = through.mean_encoded_(flat, codec, shares, owed)
        return flat

    for member in reduced(parts, PAYLOADS, work, attempts=3):
        for turn in range(3):
            assert torch.equal(torch.cat([flats[turn] for flats in member]), expected[turn])


def test_when_an_owner_drops_its_lanes_all_members_ranks_fail() -> None:
    ops, parts = DictOps(), [2, 2]
    fails = []

    def one(number: int) -> None:
        member, index = divmod(number, 2)
        transport = GlooTransport("127.0.0.1", 60.0)
        transport.parts = 2
        through: Lanes | GlooCollective
        if index:
            through = transport.lanes(NUMEL, parts, key="0.1", rank=member, ops=ops, index=1)
        else:
            through = transport.connect(key="0.1", rank=member, size=2, ops=ops).lanes(NUMEL)
        first, last = slices(NUMEL, 2)[index]
        flat = torch.ones(last - first)
        through.all_reduce_(flat)
        if number == 3:
            through.close()
            return
        if index:
            with pytest.raises((ConnectionError, InterruptedError)):
                through.all_reduce_(flat)
            fails.append(number)
        through.close()

    in_threads(4, partial(one))
    assert fails == [1]
