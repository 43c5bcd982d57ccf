"""Whose contribution is out of line: by the norms that the coordinator sees in the proposals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftopt.sync.protocol.coordinator.rounds.outliers import outliers
from ftopt.sync.protocol.messages import Contribution, excluded
from ftopt.sync.protocol.policy import FaultPolicy


def offers(*norms: float, steps: tuple[int, ...] = (), weights: tuple[float, ...] = ()) -> dict[str, Contribution]:
    steps = steps or (20,) * len(norms)
    weights = weights or tuple(map(float, steps))
    return {
        f"r{i}": Contribution(0, 3, steps[i], 100 + steps[i], weights[i], norm=norm) for i, norm in enumerate(norms)
    }


def sized(
    *excesses: float,
    norms: tuple[float, ...] = (),
    alone: tuple[float, ...] = (),
    steps: tuple[int, ...] = (),
    weights: tuple[float, ...] = (),
    gradients: bool = False,
) -> set[str]:
    """Who is out of line, by how many times the job's usual the contributions are; ``alone``: by how many times what
    their steps can make them."""
    offered = offers(*(norms or excesses), steps=steps, weights=weights)
    found = {
        replica: replace(c, excess=excess, alone=by_itself, peak=c.norm, gradients=gradients)
        for (replica, c), excess, by_itself in zip(offered.items(), excesses, alone or excesses, strict=True)
    }
    return set(outliers(found, 100.0))


def test_one_that_is_usual_for_no_one_is_out_of_line_and_the_reason_says_so() -> None:
    offered = {r: replace(c, excess=c.norm) for r, c in offers(1.0, 1.2, 0.9, 130.0).items()}
    found = outliers(offered, 100.0)
    assert list(found) == ["r3"]
    assert "130 times what is usual in this job" in found["r3"]
    assert "policy.outlier_ratio" in found["r3"]


def test_one_member_is_judged_by_what_its_steps_can_make() -> None:
    assert sized(101.0, alone=(101.0,)) == {"r0"}
    assert sized(101.0, alone=(99.0,)) == set()
    assert sized(99.0, alone=(1e9,)) == set(), "it is usual"


def test_of_two_that_disagree_the_one_that_is_not_usual_is_out_of_line() -> None:
    assert sized(1.0, 1e30) == {"r1"}
    assert sized(1.0, 1e30, alone=(1.0, 1.0)) == {"r1"}


def test_who_is_in_line_with_the_history_needs_no_peers() -> None:
    assert sized(0.1, 0.1, 50.0, norms=(1.0, 1.0, 500.0)) == set()
    assert sized(0.1, 0.1, 101.0, norms=(1.0, 1.0, 1010.0)) == {"r2"}


def test_peers_that_agree_are_in_line_whatever_the_history_says() -> None:
    assert sized(150.0, 160.0) == set()
    assert sized(1e30, 1e30) == set()
    assert sized(1e5, 1e5, 1e5) == set()
    assert sized(1e10, 2e10, 1e10) == set()
    assert sized(150.0, 160.0, 1.0) == {"r0", "r1"}, "most of the others are what is usual"


def test_two_that_are_struck_apart_do_not_vouch_for_each_other() -> None:
    assert sized(1e30, 1e36) == {"r0", "r1"}, "the smaller one is no more like the larger one than the reverse"


def test_two_that_are_bad_at_once_do_not_vouch_for_each_other_among_three() -> None:
    assert sized(9000.0, 1.0, 9500.0) == {"r0", "r2"}


def test_where_all_have_left_what_is_usual_each_is_judged_by_its_own_steps() -> None:
    assert sized(1e3, 1e7, alone=(1.0, 1.0)) == set()
    assert sized(1e3, 1e30, alone=(1.0, 1e30)) == {"r1"}


def test_a_peer_that_has_not_moved_or_has_taken_few_steps_is_no_witness() -> None:
    assert sized(0.0, 400.0, alone=(0.0, 1.0)) == set()
    assert sized(0.1, 1e6, alone=(0.0, 1.0), steps=(9, 100)) == set()
    assert sized(0.1, 1e6, alone=(0.0, 1.0), steps=(10, 100)) == {"r1"}
    assert sized(0.1, 1e30, alone=(0.0, 1e30), steps=(1, 100)) == {"r1"}


@pytest.mark.parametrize(
    "found",
    [
        sized(1.0, 1.0, 4000.0, steps=(10, 10, 500)),
        sized(1.0, 1.0, 1e9, weights=(1.0, 1.0, 0.0)),
    ],
    ids=["many more steps", "weighs nothing anyway"],
)
def test_nobody_is_out_of_line(found: set[str]) -> None:
    assert found == set()


def test_what_moves_at_a_higher_rate_may_be_larger_in_proportion() -> None:
    offered = {
        r: replace(c, excess=c.norm, reach=90.0 if r == "r1" else 1.0) for r, c in offers(1.0, 5000.0, 1.0).items()
    }
    assert outliers(offered, 100.0) == {}


@pytest.mark.parametrize(("rated", "found"), [(0.0, {"r1"}), (1.0, set()), (1e3, {"r1"})])
def test_a_rate_that_neither_the_job_nor_two_peers_have_is_out_of_line(rated: float, found: set[str]) -> None:
    """In the first round the peers tell, and the job's record afterwards: peers may be in their warm-up."""
    offered = {
        r: replace(c, excess=1.0, reach=1e3 if r == "r1" else 1.0, rated=rated if r == "r1" else 1.0)
        for r, c in offers(1.0, 5000.0, 1.0).items()
    }
    assert set(outliers(offered, 100.0)) == found


def test_one_that_was_out_of_line_among_others_stays_so_where_they_have_come_to_their_end() -> None:
    offered = {"r1": replace(offers(1.0, 5000.0)["r1"], excess=5000.0, alone=0.0)}
    assert outliers(offered, 100.0) == {}
    assert set(outliers(offered, 100.0, struck={"r1"})) == {"r1"}


def test_gradients_may_differ_by_the_square_of_the_ratio() -> None:
    assert sized(1.0, 1.0, 400.0, gradients=True) == set()
    assert sized(1.0, 1.0, 2e4, gradients=True) == {"r2"}


def test_a_single_large_element_is_out_of_line_where_the_norm_is_not() -> None:
    offered = {
        r: replace(c, peak=200.0 if r == "r3" else 1.0, excess=200.0 if r == "r3" else 1.0)
        for r, c in offers(300.0, 300.0, 300.0, 360.0).items()
    }
    assert set(outliers(offered, 100.0)) == {"r3"}


def test_what_lies_behind_the_parameters_of_one_alone_is_out_of_line() -> None:
    offered = {r: replace(c, peak=1.0, excess=1.0) for r, c in offers(1.0, 1.0).items()}
    offered["r1"] = replace(offered["r1"], behind=1e30, excess=1e30)
    assert set(outliers(offered, 100.0)) == {"r1"}


def test_without_a_limit_nobody_is() -> None:
    assert outliers({r: replace(c, excess=1e30) for r, c in offers(1.0, 1e30).items()}, None) == {}


def test_what_is_withheld_leaves_count_as_it_was() -> None:
    kept = excluded(offers(7.0)["r0"])
    assert (kept.steps, kept.last_step, kept.weight) == (0, 100, 0.0)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.01, 9.9])
def test_a_limit_that_honest_contributions_exceed_is_refused(ratio: float) -> None:
    """While rates rise, the norm or largest element of an honest one comes to 5 times the usual."""
    with pytest.raises(ValueError, match=r"outlier_ratio=.*at least 10"):
        FaultPolicy(outlier_ratio=ratio)
