"""``ftopt run`` with the user's own files, in real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.run.running import Run, events_of, summary_of

CODE = """
import torch
from torch import nn

class Line:
    def __len__(self): return 30
    def __getitem__(self, index): return {"x": torch.full((1,), index / 30.0)}

class Fit:
    steps = 0
    def __init__(self, last=10_000): self.last = last
    def loss(self, model, batch):
        self.steps += model.training
        if self.steps > self.last:
            raise RuntimeError("no more")
        return (model(batch["x"]) - 1).square().mean()
    def metrics(self, model, batch): return {"off": float((model(batch["x"]) - 1).abs().max())}

def model(): return nn.Linear(1, 1)
def data():
    print("their own words")
    return Line(), Line()
"""
RECIPE = """
name: theirs
model: {factory: theirs:model}
data: {factory: theirs.py:data, batch_size: 5}
task: {factory: theirs:Fit}
method: {name: diloco, sync_every: 20}
train: {inner_steps: 20, eval_every: 0}
log: {wandb: 'off'}
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs their recipe with overrides; exit status, and all that was said."""
    runs: list[Run] = []

    def run_one(*overrides: str) -> tuple[int, str]:
        (tmp_path / "theirs.py").write_text(CODE, encoding="utf-8")
        (tmp_path / "theirs.yaml").write_text(RECIPE, encoding="utf-8")
        runs.append(Run(tmp_path, overrides, recipe="theirs.yaml"))
        status, error = runs[0].wait()
        return status, (tmp_path / "stdout.txt").read_text(encoding="utf-8") + error

    yield run_one
    for each in runs:
        each.end()


def test_files_of_the_working_folder_are_found_and_metrics_are_in_the_summary(
    tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    status, told = run()
    assert status == 0, told
    assert "held-out off " in told
    got = summary_of(tmp_path)
    assert set(got["val_metrics_final"]) == {"off"} and got["val_accuracy_final"] is None
    assert events_of(tmp_path, "evaluate")[0]["data"]["metrics"] == got["val_metrics_initial"]


def test_an_error_of_the_users_in_training_ends_the_run_with_status_1_and_their_line(
    run: Callable[..., tuple[int, str]],
) -> None:
    status, told = run("task.args.last=3")
    assert status == 1
    assert "inner step 4 failed" in told and 'theirs.py, line 15, in loss: raise RuntimeError("no more")' in told
    assert "ftopt: your code failed in r0: RuntimeError: no more\n    at theirs.py, line 15" in told
    assert "Traceback" not in told
