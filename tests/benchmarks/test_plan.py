"""The link rates of Streaming DiLoCo's simulation, beside those of the model behind `ftopt plan`; the cases."""

from __future__ import annotations

import statistics
from functools import cache

from benchmarks.plan.cases import CASES
from benchmarks.plan.earlier import rows as earlier
from benchmarks.plan.measuring import predict
from benchmarks.plan.published import GRID, LEVELS, PUBLISHED, SIZES, WAYS, needed, on_grid
from ftopt.forecast.plan import Machines

STEP_OF_GRID = GRID[1] / GRID[0]


@cache
def cells() -> list[tuple[str, str, float, float, float]]:
    """Size, way, level, published rate, ours."""
    return [
        (size.name, way.name, level, published, needed(size, way, level))
        for size in SIZES
        for way, row in zip(WAYS, PUBLISHED[size.name], strict=True)
        for level, published in zip(LEVELS, row, strict=True)
    ]


def test_the_published_rates_lie_on_a_grid() -> None:
    for _, _, _, published, _ in cells():
        nearest = min(GRID, key=lambda rate: abs(rate - published))
        assert abs(nearest - published) < 0.06, published


def test_the_published_rates_are_reproduced_most_exactly_all_within_a_step_of_the_grid() -> None:
    found = cells()
    same = 0
    for size, way, level, published, ours in found:
        nearest = min(GRID, key=lambda rate: abs(rate - published))
        assert 1 / STEP_OF_GRID - 0.01 < on_grid(ours) / nearest < STEP_OF_GRID + 0.01, (size, way, level)
        same += on_grid(ours) == nearest
    assert len(found) == 75
    assert same == 62


def test_each_way_needs_no_more_than_the_one_before_it() -> None:
    for size in SIZES:
        for level in LEVELS:
            rates = [ours for name, _, at, _, ours in cells() if (name, at) == (size.name, level)]
            assert rates == sorted(rates, reverse=True)


def test_a_faster_link_and_a_longer_period_raise_what_is_predicted() -> None:
    by_name = {case.name: case for case in CASES}
    slow, fast = (Machines(0.03, rate) for rate in (0.1, 1.0))
    for case in CASES:
        assert 0 < predict(case, slow) <= predict(case, fast) < 1
    periods = [predict(by_name[f"DiLoCo, H {every}"], slow) for every in (10, 20, 50)]
    assert periods == sorted(periods)


def test_the_defaults_predict_the_runs_on_slow_links_that_performance_shows() -> None:
    rows = earlier()
    assert len(rows) > 10
    assert statistics.median(abs(row["difference"]) for row in rows) < 0.05
