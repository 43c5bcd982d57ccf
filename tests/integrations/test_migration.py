"""``docs/migration.md``: our side of each table runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftopt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "import ftopt" in block]


def check(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ftopt, "connect", lambda *args, **named: (asked.append(named), ftopt.solo())[1])
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [(torch.randn(8, 4), torch.zeros(8, 1)) for _ in range(12)]
    before = model.weight.detach().clone()
    names: dict[str, Any] = {"model": model, "batches": batches, "loss_of": nn.functional.mse_loss}
    exec(compile(block, str(PAGE), "exec"), names)
    (optimizer,) = [each for each in names.values() if isinstance(each, ftopt.OuterOptimizer)]
    assert len(asked) == 1 and optimizer.inner_step == 12 and optimizer.pending_steps == 0
    assert optimizer.versions[0] >= 3 and not torch.equal(model.weight, before)


def test_each_library_has_both_sides() -> None:
    every = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(BLOCKS) == 5 and len(every) == 10


@pytest.mark.parametrize("block", [block for block in BLOCKS if "accelerate" not in block])
def test_our_side_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(block, monkeypatch)


@pytest.mark.trainers
def test_our_side_runs_with_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="needs the extra `trainers`")
    (block,) = [block for block in BLOCKS if "accelerate" in block]
    check(block, monkeypatch)
