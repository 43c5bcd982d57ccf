"""What is trained, and the loop around it, in this process."""

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftopt._connect import local_groups
from ftopt.config.loader import load
from ftopt.config.model_settings import ConvnetConfig
from ftopt.config.models import build_model
from ftopt.config.schema import Recipe
from ftopt.config.tasks import task_of
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.methods import LocalSGD
from ftopt.run.subscribers import CurrentStep
from ftopt.run.train import Trainer
from tests.optimizer.running import PATIENT, together
from tests.run.running import TINY, text


def trained(recipe: Recipe, replicas: int) -> dict[str, list[Event]]:
    """Trains in threads; what each replica has told."""
    told: dict[str, list[Event]] = {}
    trainers = []
    for group in local_groups(replicas, policy=PATIENT, on_event=lambda x: told.setdefault(x.replica, []).append(x)):
        trainers.append(Trainer(recipe, group, record=CurrentStep(), evaluates=group.replica == "r0"))
    assert together([trainer.run for trainer in trainers]) == [True] * replicas
    return told


def data_of(told: list[Event], name: str) -> list[Any]:
    return [event.data for event in told if event.event == name]


Make = Callable[[Callable[[], nn.Module]], str]


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a function a user's factory; the override that names it."""

    def make(function: Callable[[], nn.Module]) -> str:
        module = types.ModuleType("their_models")
        module.__dict__.update(built=function)
        monkeypatch.setitem(sys.modules, "their_models", module)
        return "model.factory=their_models:built"

    return make


@pytest.mark.parametrize("batch_norm", [pytest.param("false", marks=pytest.mark.long), "true"])
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


def test_when_the_first_replica_has_left_the_next_one_evaluates(tmp_path: Path) -> None:
    recipe = load("diloco_bytes", [*TINY, text(tmp_path), "train.inner_steps=60", "train.eval_every=20"])
    told: list[Event] = []

    def hear(event: Event) -> None:
        if event.replica == "r1":
            told.append(event)
        elif event.event == "evaluate":
            leaver.stop()

    first, second = local_groups(2, policy=PATIENT, on_event=hear)
    leaver = Trainer(recipe, first, record=CurrentStep(), evaluates=True)
    stays = Trainer(recipe, second, record=CurrentStep(), evaluates=False)
    assert together([leaver.run, stays.run]) == [False, True]
    assert [data["final"] for data in data_of(told, "evaluate")] == [False, False, True]


def test_what_a_batch_counts(tmp_path: Path) -> None:
    images = task_of(load("digits"))
    assert images.tokens(images.batches(0).batch()) == 32
    windows = task_of(load("diloco_bytes", [*TINY, text(tmp_path)]))
    assert windows.tokens(windows.batches(0).batch()) == 4 * 16


def test_the_convolutional_net_has_the_documented_size() -> None:
    sizes = [sum(p.numel() for p in build_model(ConvnetConfig(batch_norm=norm)).parameters()) for norm in (False, True)]
    assert sizes == [9_930, 10_026]


def test_a_factory_may_read_images(factory: Make) -> None:
    task = task_of(load("digits", [factory(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))]))
    assert float(task.loss(task.batches(0).batch()).detach()) > 0
    assert task.score(thorough=True).samples == 359
    assert task.model.training


class Fn(nn.Module):
    """A model of a function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.function(inputs)


@pytest.mark.parametrize(
    ("recipe", "model", "said"),
    [
        ("diloco_bytes", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "fails on torch.int64 (1, 64): Runt"),
        ("diloco_bytes", lambda: Fn(lambda tokens: (tokens, None)), "fails on torch.int64 (1, 64): "),
        (
            "diloco_bytes",
            lambda: Fn(lambda tokens: torch.zeros(1, 256)),
            "gives (1, 256) for torch.int64 (1, 64); must",
        ),
        ("diloco_bytes", lambda: nn.Embedding(256, 100), "gives 100 classes; bytes need 256"),
        ("digits", lambda: nn.Embedding(256, 100), "fails on torch.float32 (1, 1, 8, 8): "),
        ("digits", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), "gives 9 classes; digits need 10"),
        ("digits", lambda: nn.Linear(8, 10), "must give logits (1, n), a number for each of n classes"),
        ("digits", lambda: nn.Linear(-1, 10), "with args={}: RuntimeError: "),
    ],
)
def test_a_factorys_model_that_does_not_suit_the_data_is_refused(
    recipe: str, model: Callable[[], nn.Module], said: str, factory: Make
) -> None:
    with pytest.raises(UserError, match=re.escape("model.factory='their_models:built'")) as refusal:
        task_of(load(recipe, [factory(model)]))
    assert said in str(refusal.value)


def test_trying_a_factorys_model_leaves_the_chance_and_the_mode_alone(factory: Make) -> None:
    noisy = Fn(lambda tokens: torch.randn(*tokens.shape, 256))
    torch.manual_seed(3)
    first = torch.rand(())
    torch.manual_seed(3)
    task = task_of(load("diloco_bytes", [factory(lambda: noisy)]))
    assert torch.equal(torch.rand(()), first)
    assert task.model.training


def test_tokens_beyond_what_a_factorys_model_knows_are_refused(factory: Make, tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(range(100)) * 20)
    data = f"data={{name: tokens, path: {tmp_path / 'tokens.bin'}, dtype: uint8}}"
    task = task_of(load("diloco_bytes", [factory(lambda: nn.Embedding(50, 50)), data]))
    with pytest.raises(UserError, match="must be below vocab=50"):
        task.score(thorough=False)


def test_a_recipe_that_was_not_checked_is_refused_all_the_same() -> None:
    unlike = Recipe(name="unlike", method=LocalSGD(sync_every=5), model=ConvnetConfig())
    with pytest.raises(UserError, match=re.escape("model.name=convnet reads images; use data.name=digits")):
        task_of(unlike)


def test_an_evaluation_leaves_no_gradient_and_half_precision_gives_fp32_logits() -> None:
    task = task_of(load("digits", ["train.autocast=bf16"]))
    assert task.loss(task.batches(0).batch()).dtype == torch.float32
    task.score(thorough=False)
    assert all(p.grad is None for p in task.model.parameters())
