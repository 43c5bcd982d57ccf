"""What is trained, and the loop around it, in this process."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftopt.config.loader import load
from ftopt.config.schema import Convnet, Recipe
from ftopt.connect import local_groups
from ftopt.events import Event
from ftopt.job.model import build
from ftopt.job.subscribers import StepRecord
from ftopt.job.task import task_of
from ftopt.job.train import Trainer
from tests.job.running import TINY, text
from tests.optimizer.running import together


def trained(recipe: Recipe, replicas: int) -> dict[str, list[Event]]:
    """Trains in threads; what each replica has told."""
    told: dict[str, list[Event]] = {}
    trainers = []
    for group in local_groups(replicas):
        events = told.setdefault(group.replica, [])
        trainers.append(Trainer(recipe, group, events.append, record=StepRecord(), evaluates=group.replica == "r0"))
    assert together([trainer.run for trainer in trainers]) == [True] * replicas
    return told


def data_of(told: list[Event], name: str) -> list[Any]:
    return [event.data for event in told if event.event == name]


@pytest.mark.parametrize("batch_norm", ["false", "true"])
def test_replicas_learn_the_digits_and_agree(batch_norm: str) -> None:
    steps = ["train.inner_steps=80", "inner.schedule.warmup=5", "train.eval_every=40"]
    told = trained(load("digits", [f"model.batch_norm={batch_norm}", *steps]), 2)
    first, *_, last = data_of(told["r0"], "evaluate")
    assert first["accuracy"] < 0.3
    assert last["accuracy"] > 0.9
    assert last["samples"] == 359
    assert len({data["anchor_digest"] for events in told.values() for data in data_of(events, "end")}) == 1


def test_text_is_scored_by_its_loss_alone(tmp_path: Path) -> None:
    settings = [*TINY, text(tmp_path), "train.inner_steps=40", "train.eval_every=20"]
    first, between, last = data_of(trained(load("diloco_bytes", settings), 1)["r0"], "evaluate")
    assert last["loss"] < first["loss"]
    assert last["accuracy"] is None
    assert (first["samples"], between["samples"], last["samples"]) == (512, 128, 512)


def test_what_a_batch_counts(tmp_path: Path) -> None:
    images = task_of(load("digits"))
    assert images.tokens(images.batches(0).batch()[0]) == 32
    windows = task_of(load("diloco_bytes", [*TINY, text(tmp_path)]))
    assert windows.tokens(windows.batches(0).batch()[0]) == 4 * 16


def test_the_convolutional_net_has_the_documented_size() -> None:
    sizes = [sum(p.numel() for p in build(Convnet(batch_norm=norm)).parameters()) for norm in (False, True)]
    assert sizes == [9_930, 10_026]


def test_a_factory_may_read_images(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("their_models")
    module.__dict__.update(flat=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    monkeypatch.setitem(sys.modules, "their_models", module)
    task = task_of(load("digits", ["model.factory=their_models:flat"]))
    assert float(task.loss(*task.batches(0).batch()).detach()) > 0
    assert task.score(thorough=True).samples == 359
    assert task.model.training


def test_an_evaluation_leaves_no_gradient_and_half_precision_gives_fp32_logits() -> None:
    task = task_of(load("digits", ["train.autocast=bf16"]))
    pixels, _ = task.batches(0).batch()
    assert task.logits(pixels).dtype == torch.float32
    task.score(thorough=False)
    assert all(p.grad is None for p in task.model.parameters())
