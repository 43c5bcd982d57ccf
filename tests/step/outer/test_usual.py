"""What is usual: honest work of any size is in line, a flipped bit is not, and the record is alike everywhere."""

from __future__ import annotations

import pytest
import torch

from ftopt.step.outer.usual import Sizes, Told, Usual, first_usual, usual_of

R = 100.0
ELEMENTS = 10_000


def first(size: float) -> Usual:
    """The record at version 0 of an anchor of normal numbers."""
    anchor = size * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    return usual_of(first_usual(anchor))


def moved(each: float, steps: int = 100, rate: float = 0.01, peak: float | None = None) -> Sizes:
    """All elements by ``each``, but for one by ``peak``."""
    peak = each if peak is None else peak
    return Sizes(steps, (ELEMENTS * each**2 + peak**2) ** 0.5, peak, 0.0, steps * rate)


def after(usual: Usual, *each: Sizes) -> Usual:
    for own in each:
        usual = usual.after([Told(1.0, own)], own.peak)
    return usual


@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-2, 1.0])
def test_what_an_optimizer_moves_by_its_rate_alone_is_in_line_whatever_the_first_anchor_is(size: float) -> None:
    usual = first(size)
    for own in (moved(1.0), moved(0.01, steps=1), moved(100.0, rate=1.0), moved(5.0, steps=500, rate=0.01)):
        assert usual.excess(own, R) <= R
        usual = after(usual, own)


@pytest.mark.parametrize("rates", [(1e-9, 1.0), (1.0, 1e-9, 1.0), (1e-5, 0.0, 0.1)])
def test_a_rate_that_changes_leaves_what_is_usual_as_it_is(rates: tuple[float, ...]) -> None:
    usual = first(1e-4)
    for rate in rates:
        own = moved(50.0 * rate, rate=rate)
        assert usual.excess(own, R) <= R
        usual = after(usual, own)


@pytest.mark.parametrize("steps", [(500, 1), (1, 500), (100, 5, 100)])
def test_rounds_of_more_or_fewer_steps_are_in_line(steps: tuple[int, ...]) -> None:
    usual = first(0.0)
    for count in steps:
        own = moved(30.0 * count**0.5, steps=count, rate=1e-3)
        assert usual.alone(own, R) <= R
        usual = after(usual, own)


def test_a_loss_that_leaves_its_plateau_is_in_line_for_a_lone_replica() -> None:
    usual = after(first(1e-4), *[moved(1e-7, rate=1e-7)] * 9)
    own = moved(0.7, peak=2.0, rate=1e-7)
    assert usual.excess(own, R) > R, "two that disagree are told apart by it"
    assert usual.alone(own, R) <= R


@pytest.mark.parametrize("rounds", [0, 1, 9])
@pytest.mark.parametrize("value", [1e9, 1e18, 1e38])
def test_a_flipped_exponent_is_beyond_all_that_steps_make(value: float, rounds: int) -> None:
    usual = after(first(0.02), *[moved(1e-3)] * rounds)
    own = moved(1e-3, peak=value)
    assert usual.excess(own, R) > R
    assert usual.alone(own, R) > R


def test_a_lone_replica_moves_no_element_by_more_than_the_limit_times_the_largest_there_was() -> None:
    usual = after(first(0.02), *[moved(1e-3, rate=1e-4)] * 9)
    assert usual.alone(moved(1e-3, peak=101.0, rate=1e-4), R) > R


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e9])
def test_a_lone_replicas_gradients_may_have_any_scale_and_change_it(scale: float) -> None:
    usual, limit = first(0.0), R * R
    for each in (scale, 0.1 * scale, 1e6 * scale):
        own = gradient(moved(each, steps=1))
        assert usual.alone(own, limit) <= limit
        usual = after(usual, own)
    assert usual.alone(gradient(moved(scale, steps=1, peak=1e36)), limit) > limit


def gradient(own: Sizes) -> Sizes:
    """As of a gradient."""
    return own._replace(reach=0.0)


def test_averaged_buffers_may_follow_data_of_another_scale_but_hold_no_flipped_bit() -> None:
    usual = after(first(0.02), moved(1e-3)._replace(behind=0.1))
    images = moved(1e-3)._replace(behind=255.0**2)
    assert usual.alone(images, R) <= R
    assert usual.alone(images._replace(behind=1e30), R) > R
    assert usual.excess(images._replace(behind=1.0), R) <= R


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-4, 1.0, 1e4])
def test_an_anchor_without_an_element_of_1_counts_as_if_it_were_scaled_until_it_has_one(size: float) -> None:
    found = usual_of(first_usual(torch.full((ELEMENTS,), size)))
    assert found.first_peak == pytest.approx(max(1.0, size))
    assert found.first_norm == pytest.approx(found.root * max(1.0, size), rel=1e-6)


def test_the_record_holds_no_number_that_is_not_finite() -> None:
    own = Sizes(1, 3e38, 3e38, 3e38, 5e-324)
    found = after(Usual(first_norm=1.0, first_peak=1.0, root=1.0), own, gradient(own))
    assert torch.isfinite(found.tensor()).all()
    assert found._replace(norm=0.0).excess(own, R) < float("inf")


def test_an_empty_fragment_has_nothing_out_of_line() -> None:
    usual = usual_of(first_usual(torch.empty(0)))
    own = Sizes(1, 0.0, 0.0, 0.0, 0.0)
    assert usual.excess(own, R) == usual.alone(own, R) == 0.0
