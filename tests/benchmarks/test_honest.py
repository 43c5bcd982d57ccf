"""Clean runs drop no step, whatever is large or small in them."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from benchmarks.honest import FACTORS, Found, named, run_cell, sample, table

CELLS = [
    "DiLoCo/normal-0.01/adamw/0.05/20/1/2/plain",
    "LocalSGD/normal-0.01/adamw/0.05/20/1/2/plain",
    "SlowMo/zeros/adam/0.1/10/1/2/plain",
    "Streaming/normal-0.0001/rmsprop/0.1/10/1/2/plain",
    "DiLoCo/lora/adamw/0.1/10/1/1/warm-up",
    "DiLoCo/normal-0.0001/lion/0.1/10/1/1/plain",
    "LocalSGD/normal-0.0001/sgd/1e-06/10/1000000/1/rate-rises",
    "DiLoCo/normal-0.01/adamw/0.05/10/1/2/unfreezes",
    "DiLoCo/default/momentum/0.01/10/1/2/other-data",
    "SyncSGD/default/sgd/1e-07/1/1000000/2/plain",
    "SyncSGD/default/adamw/0.001/1/1000000/1/plain",
    "SyncSGD/normal-0.0001/adam/1.0/1/1000000/1/plain",
    "PAFT/normal-0.1/adagrad/0.1/10/1000000/2/plain",
]


@pytest.mark.parametrize("name", CELLS)
def test_a_clean_run_drops_no_step(name: str) -> None:
    found = run_cell(named(name))
    assert (found.failed, found.dropped, found.excluded) == ("", 0, 0)


def test_a_sample_has_all_levels_of_each_factor_and_the_table_a_row_for_each() -> None:
    cells = sample(70, 0)
    assert cells == sample(70, 0) and cells != sample(70, 1)
    for factor, levels in FACTORS.items():
        assert {getattr(cell, factor) for cell in cells} == set(levels)
    lines = table(cells, [Found(dropped=2, excluded=1)] * len(cells))
    assert len(lines) == 2 + sum(map(len, FACTORS.values()))
    assert "| size | 2 | " in lines[-len(FACTORS["scene"]) - 2]
    assert all(named(cell.name) == cell for cell in cells)


def test_a_run_that_diverges_is_no_complaint_and_one_with_dropped_steps_is() -> None:
    assert not Found(nonfinite=9, excluded=3).wrong
    assert Found(dropped=8, excluded=2).wrong == "8 steps dropped, 2 contributions excluded"
    assert Found(failed="hangs").wrong == "hangs"


def test_a_cell_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["honest", "--cells", "DiLoCo/ones"]) == 2
    assert "'DiLoCo/ones' is no cell" in capsys.readouterr().out


@pytest.mark.long
def test_the_verb_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["honest", "--cells", *CELLS[:2], "--jobs", "1"]) == 0
    assert "2 clean runs, 0 steps dropped, 0 runs with a complaint" in capsys.readouterr().out
