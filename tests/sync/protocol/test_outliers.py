"""Whose contribution is out of line: by the norms that the coordinator sees in the proposals."""

from __future__ import annotations

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
    assert "130 times the median of its peers', 1" in found["r3"]
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


def test_without_a_limit_nobody_is() -> None:
    assert outliers(offers(1.0, 1.0, 1e30), None) == {}


def test_what_is_withheld_leaves_count_as_it_was() -> None:
    kept = excluded(offers(7.0)["r0"])
    assert (kept.steps, kept.last_step, kept.weight) == (0, 100, 0.0)


def test_a_limit_that_takes_everybody_for_an_outlier_is_refused() -> None:
    with pytest.raises(ValueError, match="outlier_ratio=1"):
        Sync(outlier_ratio=1.0)
