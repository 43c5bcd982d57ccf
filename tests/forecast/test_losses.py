"""Published and measured losses."""

from __future__ import annotations

import pytest

import ftopt
from ftopt.forecast.losses import LEAST_PUBLISHED, MEASURED, penalty
from ftopt.methods import Method


def percent(method: Method, codec: str = "fp32", parameters: float = 131_000) -> float:
    found = penalty(method, codec, int(parameters)).percent
    assert found is not None
    return found


def test_exchanging_gradients_in_each_step_costs_nothing() -> None:
    assert percent(ftopt.SyncSGD()) == 0.0
    assert penalty(ftopt.SyncSGD(), "fp4", 1000).percent is None


@pytest.mark.parametrize(("every", "expected"), [(10, 9.3), (50, 14.2), (100, 16.5)])
def test_measured_points_are_met(every: int, expected: float) -> None:
    assert percent(ftopt.DiLoCo(sync_every=every)) == pytest.approx(expected)


def test_streaming_with_delay_and_fp4_is_as_measured() -> None:
    method = ftopt.StreamingDiLoCo(sync_every=50, delay=5)
    assert percent(method) == pytest.approx(16.0)
    assert percent(method, "fp4") == pytest.approx(15.8, abs=0.5)


def test_a_large_model_has_the_papers_figures() -> None:
    method = ftopt.StreamingDiLoCo(sync_every=100, delay=1)
    found = penalty(method, "fp4", 500_000_000)
    assert found.percent == pytest.approx(100 * (2.69 / 2.67 - 1), abs=0.03)
    assert "arXiv 2501.18512, table 5: 500M" in found.source
    assert percent(ftopt.DiLoCo(sync_every=30), parameters=1e9) == 0.0


def test_longer_periods_cost_no_less_at_any_size() -> None:
    for parameters in (1e5, LEAST_PUBLISHED, 1.2e8, 1e9, 1e11):
        found = [percent(ftopt.DiLoCo(sync_every=every), parameters=parameters) for every in (10, 30, 100, 300, 1000)]
        assert found == sorted(found)
    assert "extrapolated to H 500" in penalty(ftopt.DiLoCo(sync_every=500), "fp32", 10**8).source


@pytest.mark.parametrize(
    "method",
    [
        ftopt.SlowMo(sync_every=12),
        ftopt.PAFT(sync_every=10),
        ftopt.DiLoCo(pacing=ftopt.methods.BySpeed(round_steps=200)),
        ftopt.DiLoCo(sync_every=50, trigger=ftopt.triggers.Every(20)),
    ],
)
def test_where_there_is_no_figure_none_is_made_up(method: Method) -> None:
    found = penalty(method, "fp32", 131_000)
    assert found.percent is None and found.source.startswith("no figure")
    assert penalty(ftopt.DiLoCo(sync_every=50), "top_k:0.03:4", 131_000).percent is None
    assert set(MEASURED) >= {"diloco", "local_sgd"}
