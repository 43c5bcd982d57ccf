"""Compute and transfers on one link."""

from __future__ import annotations

from collections.abc import Sequence

from ftopt.forecast.timeline import Transfer, play


def wall_s(period_s: float, transfers: Sequence[Transfer]) -> float:
    return play(period_s, transfers).wall_s


def test_without_transfers_all_of_the_time_is_computation() -> None:
    assert wall_s(5.0, []) == 5.0


def test_a_transfer_that_is_needed_at_once_holds_the_computation() -> None:
    assert wall_s(10.0, [Transfer(0.0, 0.0, link_s=2.0, lag_s=0.5, held_s=0.25)]) == 12.75


def test_a_transfer_is_hidden_behind_the_computation_until_it_is_needed() -> None:
    assert wall_s(10.0, [Transfer(1.0, 4.0, link_s=3.0)]) == 10.0
    assert wall_s(10.0, [Transfer(1.0, 4.0, link_s=5.0)]) == 12.0


def test_the_link_has_one_transfer_at_a_time() -> None:
    pair = [Transfer(0.0, 2.0, link_s=2.0), Transfer(1.0, 2.0, link_s=2.0)]
    assert wall_s(10.0, pair) == 12.0
    assert wall_s(10.0, [Transfer(5.0, 5.0, link_s=1.0), Transfer(0.0, 0.0, link_s=1.0)]) == 12.0


def test_a_result_may_be_needed_in_a_later_period() -> None:
    assert wall_s(10.0, [Transfer(9.0, 14.0, link_s=5.0)]) == 10.0
    assert wall_s(10.0, [Transfer(9.0, 14.0, link_s=7.0)]) == 12.0


def test_a_late_result_is_waited_for_when_the_same_is_due_again() -> None:
    assert wall_s(10.0, [Transfer(0.0, 1.0, link_s=8.0, patience_s=0.0)]) == 10.0
    assert wall_s(10.0, [Transfer(0.0, 1.0, link_s=8.0, patience_s=3.0)]) == 13.0
    assert wall_s(10.0, [Transfer(0.0, 1.0, link_s=8.0)]) == 17.0
    assert wall_s(10.0, [Transfer(0.0, 1.0, link_s=14.0, patience_s=0.0)]) == 14.0
