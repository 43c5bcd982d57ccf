"""Clean runs drop no step, whatever is large or small in them: a sample of `python -m benchmarks honest`."""

from __future__ import annotations

import pytest

from benchmarks.honest import named, run_cell

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
    "PAFT/normal-0.1/adagrad/0.1/10/1000000/2/plain",
]


@pytest.mark.parametrize("name", CELLS)
def test_a_clean_run_drops_no_step(name: str) -> None:
    found = run_cell(named(name))
    assert (found.failed, found.dropped, found.excluded) == ("", 0, 0)
