"""The loop in ``docs/data.md`` that skips a micro-batch goes on, and the rest of the batch is the mean.

The page itself is run by ``tests/test_pages.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ftopt
from tests.pages import ROOT, programs


def test_the_loop_that_skips_goes_on_and_the_rest_of_the_batch_is_the_mean(caplog: pytest.LogCaptureFixture) -> None:
    class Skipping(torch.nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise torch.OutOfMemoryError
            return super().forward(x)

    model = Skipping(8, 1)
    names: dict[str, Any] = {"ftopt": ftopt, "torch": torch, "nn": torch.nn, "model": model}
    [loop] = [block for block in programs(ROOT / "docs" / "data.md") if "OutOfMemoryError" in block.text]
    exec(loop.text, names)
    group = ftopt.solo()
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.SyncSGD(), group=group)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    loader = ftopt.DataLoader(data, batch_size=4, global_batch=16, group=group)
    with optimizer:
        names["train"](loader, optimizer)
    assert optimizer.status.versions == (2,) and model.calls == 8
    assert "left out of its global batch" in caplog.text
