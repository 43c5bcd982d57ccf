"""Whose contribution is out of line: by the norms that the coordinator sees in the proposals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftopt.sync.protocol.coordinator.outliers import outliers
from ftopt.sync.protocol.messages import Contribution, excluded
from ftopt.sync.protocol.settings import Sync


def offers(*norms: float, steps: tuple[int, ...] = (), weights: tuple[float, ...] = ()) -> dict[str, Contribution]:
    steps = steps or (20,) * len(norms)
    weights = weights or tuple(map(float, steps))
    return {
        f"r{i}": Contribution(0, 3, steps[i], 100 + steps[i], weights[i], norm=norm) for i, norm in enumerate(norms)
    }


def test_one_beyond_the_multiple_of_its_peers_median_is_out_of_line() -> None:
    found = outliers(offers(1.0, 1.2, 0.9, 130.0), 100.0)
    assert list(found) == ["r3"]
    assert "130 times the median of its peers'" in found["r3"]
    assert "sync.outlier_ratio" in found["r3"]


@pytest.mark.parametrize(
    "contributions",
    [
        offers(1.0, 1.2, 0.9, 99.0),
        offers(1.0, 1e9),
        offers(0.0, 0.0, 5.0),
        offers(1.0, 1.0, 4000.0, steps=(10, 10, 500)),
        offers(1.0, 1.0, 1e9, weights=(1.0, 1.0, 0.0)),
    ],
    ids=["within", "one peer knows nothing", "no norm to compare with", "many more steps", "weighs nothing anyway"],
)
def test_nobody_is_out_of_line(contributions: dict[str, Contribution]) -> None:
    assert outliers(contributions, 100.0) == {}


def sized(
    *excesses: float, norms: tuple[float, ...] = (), redone: tuple[int, ...] = (), gradients: bool = False
) -> set[str]:
    """Who is out of line, by how many times the job's usual the contributions are; ``redone`` tells who has come to it
    again."""
    offered = offers(*(norms or excesses))
    found = {
        replica: replace(c, excess=excess, redone=i in redone, peak=c.norm, gradients=gradients)
        for i, ((replica, c), excess) in enumerate(zip(offered.items(), excesses, strict=True))
    }
    return set(outliers(found, 100.0))


def test_one_or_two_members_are_judged_by_the_jobs_own_history() -> None:
    assert sized(101.0) == {"r0"}
    assert sized(99.0) == set()
    assert sized(1.0, 1e30) == {"r1"}
    assert sized(1e30, 1e30) == {"r0", "r1"}, "two may be struck alike"


def test_who_is_in_line_with_the_history_needs_no_peers() -> None:
    assert sized(0.1, 0.1, 50.0, norms=(1.0, 1.0, 500.0)) == set()
    assert sized(0.1, 0.1, 101.0, norms=(1.0, 1.0, 1010.0)) == {"r2"}


def test_peers_that_have_grown_alike_vouch_for_each_other() -> None:
    assert sized(150.0, 160.0, 170.0) == set()
    assert sized(150.0, 160.0, 1.0) == {"r0", "r1"}
    assert sized(150.0, 160.0) == {"r0", "r1"}
    assert sized(1e5, 1e5, 1e5) == {"r0", "r1", "r2"}


def test_two_that_are_bad_at_once_do_not_vouch_for_each_other_among_three() -> None:
    assert sized(9000.0, 1.0, 9500.0) == {"r0", "r2"}


def test_what_comes_again_after_it_was_dropped_is_honest_unless_the_peers_differ() -> None:
    assert sized(1e10, redone=(0,)) == set()
    assert sized(1e10, 1e10, redone=(0, 1)) == set()
    assert sized(1e10, 1e10, redone=(0,)) == {"r0", "r1"}
    assert sized(1e10, 2e10, 1e10, redone=(0, 1, 2)) == set()
    assert sized(1.0, 400.0, redone=(1,)) == {"r1"}
    assert sized(1.0, 1.0, 400.0, redone=(2,)) == {"r2"}


def test_gradients_may_differ_by_the_square_of_the_ratio() -> None:
    assert sized(1.0, 1.0, 400.0, gradients=True) == set()
    assert sized(1.0, 1.0, 2e4, gradients=True) == {"r2"}


def test_a_single_large_element_is_out_of_line_where_the_norm_is_not() -> None:
    offered = {r: replace(c, peak=200.0 if r == "r3" else 1.0) for r, c in offers(300.0, 300.0, 300.0, 360.0).items()}
    assert set(outliers(offered, 100.0)) == {"r3"}


def test_without_a_limit_nobody_is() -> None:
    assert outliers(offers(1.0, 1.0, 1e30), None) == {}


def test_what_is_withheld_leaves_count_as_it_was() -> None:
    kept = excluded(offers(7.0)["r0"])
    assert (kept.steps, kept.last_step, kept.weight) == (0, 100, 0.0)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.01, 9.9])
def test_a_limit_that_honest_contributions_exceed_is_refused(ratio: float) -> None:
    """While rates rise, the norm or largest element of an honest one comes to 5 times the usual."""
    with pytest.raises(ValueError, match=r"outlier_ratio=.*at least 10"):
        Sync(outlier_ratio=ratio)
