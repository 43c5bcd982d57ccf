"""Sets of integers as ranges, against Python's sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ftopt.sync.protocol import intervals as iv

RAW = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)
SETS = RAW.map(lambda pairs: iv.union(pairs))


def members(a: iv.Ranges) -> set[int]:
    return {x for start, stop in a for x in range(start, stop)}


def is_normal(a: iv.Ranges) -> bool:
    return all(start < stop for start, stop in a) and all(x[1] < y[0] for x, y in pairwise(a))


@settings(deadline=None)
@given(RAW, RAW)
def test_union_is_that_of_the_members_in_normal_form(a: list[iv.Range], b: list[iv.Range]) -> None:
    got = iv.union(a, b)
    assert is_normal(got)
    assert members(got) == members(tuple(a)) | members(tuple(b))


@settings(deadline=None)
@given(SETS, SETS)
def test_difference_and_intersection(a: iv.Ranges, b: iv.Ranges) -> None:
    for got, expected in (
        (iv.subtract(a, b), members(a) - members(b)),
        (iv.intersect(a, b), members(a) & members(b)),
    ):
        assert is_normal(got)
        assert members(got) == expected
    assert iv.contains(b, a) == (members(a) <= members(b))


@settings(deadline=None)
@given(SETS, st.integers(0, 50), st.integers(1, 4))
def test_the_first_ones(a: iv.Ranges, count: int, parts: int) -> None:
    got = iv.first(a, count, parts=parts)
    assert is_normal(got)
    assert len(got) <= parts
    expected = sorted(members(a[:parts]))[:count]
    assert sorted(members(got)) == expected


@settings(deadline=None)
@given(SETS)
def test_size_end_and_low_water_mark(a: iv.Ranges) -> None:
    inside = members(a)
    assert iv.size(a) == len(inside)
    assert iv.end(a) == max(inside, default=-1) + 1
    assert iv.low_water(a) == next(x for x in range(50) if x not in inside)
