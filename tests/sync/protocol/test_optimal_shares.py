"""Shares of a global batch, and a dead replica's, beside the best that there are, found by trying all."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftopt.sync.protocol.intervals import size
from ftopt.sync.protocol.ledger import plans
from ftopt.sync.protocol.ledger.plans import BatchPlan, first_plan, share_out
from ftopt.sync.protocol.messages import IncarnationId

PACES = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 7.0])
NAMES: tuple[IncarnationId, ...] = tuple((name, 1) for name in "abcde")


def best_s(count: int, unit_s: Sequence[float], left: Sequence[int], least: int = 0) -> float:
    """The least time after which so many units are done, by replicas that have so many ``left`` to do before."""
    ways = itertools.product(range(least, count + 1), repeat=len(unit_s))
    return min(taken_s(way, unit_s, left) for way in ways if sum(way) == count)


def taken_s(way: Sequence[int], unit_s: Sequence[float], left: Sequence[int]) -> float:
    return max((more + before) * each for more, before, each in zip(way, left, unit_s, strict=True))


def counted(shares: Mapping[IncarnationId, object], names: Sequence[IncarnationId]) -> list[int]:
    return [size(shares.get(name, ())) for name in names]  # type: ignore[arg-type]


@given(st.integers(1, 8), st.lists(PACES, min_size=1, max_size=4))
def test_shares_by_speed_are_the_best_and_even_ones_are_kept_only_where_they_cost_little(
    count: int, unit_s: list[float]
) -> None:
    names = NAMES[: len(unit_s)]
    shares = share_out(((0, count),), dict(zip(names, unit_s, strict=True)))
    got_s = taken_s(counted(shares, names), unit_s, [0] * len(names))
    optimum_s = best_s(count, unit_s, [0] * len(names))
    assert got_s == optimum_s or got_s <= max(plans.EVEN * optimum_s, optimum_s + plans.WORTH_S)


@given(st.integers(1, 8), st.lists(PACES, min_size=1, max_size=4))
def test_without_a_liking_for_even_shares_they_are_the_best_for_every_number_of_replicas(
    count: int, unit_s: list[float]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "EVEN", 1.0)
        patch.setattr(plans, "WORTH_S", 0.0)
        for replicas in range(1, len(unit_s) + 1):
            names, each_s = NAMES[:replicas], unit_s[:replicas]
            plan = first_plan(1, 1, ((0, count),), dict(zip(names, each_s, strict=True)))
            least = 1 if count >= replicas else 0
            got_s = taken_s(counted(plan.shares, names), each_s, [0] * replicas)
            assert got_s == best_s(count, each_s, [0] * replicas, least)


@given(st.lists(st.tuples(PACES, st.integers(0, 4)), min_size=1, max_size=3), st.integers(1, 6))
def test_a_dead_replicas_units_are_handed_out_as_well_as_can_be_beside_what_each_has_left(
    survivors: list[tuple[float, int]], lost: int
) -> None:
    names = NAMES[1 : 1 + len(survivors)]
    unit_s, left = [pace for pace, _ in survivors], [units for _, units in survivors]
    shares, start = {NAMES[0]: ((0, lost),)}, lost
    for name in names:  # each had 4 units, and has so many of them left
        shares[name] = ((start, start + 4),)
        start += 4
    plan = BatchPlan(1, 1, ((0, start),), shares)
    after = plan.without(2, names, dict(zip(names, unit_s, strict=True)), dict(zip(names, left, strict=True)))
    more = [units - 4 for units in counted(after.shares, names)]
    assert sum(more) == lost
    assert taken_s(more, unit_s, left) == best_s(lost, unit_s, left)


def test_equal_shares_may_be_several_units_from_the_best_by_design() -> None:
    """Machines that differ by a fifth: 436 and 364 units would be done 36 units of the slower one sooner."""
    names, unit_s = NAMES[:2], [1.0, 1.2]
    shares = share_out(((0, 800),), dict(zip(names, unit_s, strict=True)))
    assert counted(shares, names) == [400, 400]
    sooner_s = taken_s([400, 400], unit_s, [0, 0]) - taken_s([436, 364], unit_s, [0, 0])
    assert round(sooner_s / 1.2) == 36
