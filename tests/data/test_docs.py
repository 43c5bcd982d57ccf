"""The examples of ``docs/data.md`` and ``docs/gradient_reuse.md`` run as they stand there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ftopt

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "data.md"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_example_trains_through_both_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    optimizer, loader = names["optimizer"], names["loader"]
    assert optimizer.local_steps == 2 * 40  # type: ignore[attr-defined]  # 625 windows by 16
    assert optimizer.pending_steps == 0  # type: ignore[attr-defined]
    assert loader.epoch == 1  # type: ignore[attr-defined]


@pytest.fixture
def page() -> list[str]:
    """The programs of the page about a global batch."""
    text = (DOCS / "gradient_reuse.md").read_text(encoding="utf-8")
    return [block.split("```")[0] for block in text.split("```python\n")[1:]]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_programs_about_a_global_batch_train(page: list[str]) -> None:
    names: dict[str, Any] = {}
    for program, steps in zip(page[:2], (60, 20), strict=True):
        exec(program, names)
        assert names["optimizer"].versions == (steps,)


def test_the_loop_that_skips_goes_on_and_the_rest_of_the_batch_is_the_mean(
    page: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Skipping(torch.nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise torch.OutOfMemoryError
            return super().forward(x)

    model = Skipping(8, 1)
    names: dict[str, Any] = {"ftopt": ftopt, "torch": torch, "nn": torch.nn, "model": model}
    exec(page[2], names)
    group = ftopt.solo()
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.SyncSGD(), group=group)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    loader = ftopt.DataLoader(data, batch_size=4, global_batch=16, group=group)
    with optimizer:
        names["train"](loader, optimizer)
    assert optimizer.versions == (2,) and model.calls == 8
    assert "left out of its global batch" in caplog.text
