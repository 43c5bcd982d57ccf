"""A data set, a loss and metrics of the user's own, in this process."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups
from ftopt.config.loader import load
from ftopt.config.objectives import moved, tensors_of
from ftopt.config.own_code import OwnCodeFailed
from ftopt.config.schema import Recipe
from ftopt.config.tasks import task_of
from ftopt.errors import UserError
from ftopt.run.subscribers import CurrentStep
from ftopt.run.train import Trainer
from ftopt.watch.sentences import note_of
from tests.run.test_task import data_of, trained


class Squares:
    """Samples are nested; y = x squared."""

    def __init__(self, count: int = 60) -> None:
        self.x = torch.linspace(-1, 1, count).unsqueeze(1) if count else torch.empty(0, 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return {"name": "a point", "point": (self.x[index], [self.x[index] ** 2])}


class Fit:
    """Mean squared error of such samples."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, (y,) = batch["point"]
        return nn.functional.mse_loss(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        assert not model.training
        return {"rows": torch.tensor(len(batch["name"]))}


Own = Callable[..., Recipe]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Own:
    """A recipe of the user's own model, data and task; each can be given as a function."""

    def make(*overrides: str, **parts: Any) -> Recipe:
        module = types.ModuleType("their_job")
        usual = {"model": lambda: nn.Linear(1, 1), "data": lambda: (Squares(), Squares(7)), "task": Fit}
        module.__dict__.update(usual | parts)
        monkeypatch.setitem(sys.modules, "their_job", module)
        factories = [f"{part}.factory=their_job:{part}" for part, it in (usual | parts).items() if it is not None]
        short = ["train.inner_steps=6", "method.sync_every=3", "inner.schedule.warmup=0", "data.batch_size=4"]
        return load("diloco_bytes", [*factories, *short, *overrides])

    return make


def test_replicas_train_on_nested_samples_and_report_the_metrics(recipe: Own) -> None:
    told = trained(recipe(), 2)
    first, *_, last = data_of(told["r0"], "evaluate")
    assert last["loss"] < first["loss"]
    assert last["metrics"] == {"rows": pytest.approx((4 * 4 + 3 * 3) / 7, abs=1e-4)}
    assert (last["accuracy"], last["samples"]) == (None, 7)
    record = {"event": "evaluate", "replica": "r0", "incarnation": 1, "inner_step": 3, "data": {**last, "final": False}}
    assert "rows 3.571" in str(note_of(record))
    assert len({data["anchor_digest"] for events in told.values() for data in data_of(events, "end")}) == 1


def test_pairs_need_no_task_and_report_the_accuracy(recipe: Own) -> None:
    pairs = [(torch.tensor([float(i % 2)]), i % 2) for i in range(8)]
    task = task_of(recipe(data=lambda: (pairs, pairs), model=lambda: nn.Linear(1, 2), task=None))
    assert set(task.score(thorough=True).metrics) == {"accuracy"}
    assert task.tokens(task.batches(0).batch()) == 4


def test_a_data_set_may_make_its_own_batches(recipe: Own) -> None:
    class Ragged(Squares):
        def collate_fn(self, samples: list[Any]) -> dict[str, Any]:
            return {"name": [], "point": (torch.stack([s["point"][0] for s in samples]) * 2, [torch.zeros(1, 1)])}

    task = task_of(recipe(data=lambda: (Ragged(), Ragged(5))))
    assert float(tensors_of(task.batches(1).batch()).__next__().abs().max()) > 1


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"data": lambda: None}, "data.factory='their_job:data' returned a NoneType; must be a pair"),
        ({"data": lambda: (Squares(0), Squares())}, "the data set to train on is empty"),
        ({"data": lambda: (Squares(), Squares(0))}, "the data set to evaluate on is empty"),
        ({"data": lambda: (iter([]), Squares())}, "must have positions, len(dataset) and dataset[index]"),
        ({"model": lambda: None}, "model.factory='their_job:model' returned a NoneType; must be a torch.nn.Module"),
        ({"model": nn.ReLU}, "returned a ReLU without parameters to train"),
        ({"task": dict}, "task.factory='their_job:task' gives a dict; must be an object with a method loss"),
    ],
)
def test_what_a_factory_returns_is_checked(recipe: Own, parts: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        task_of(recipe(**parts))


def task_with(**methods: Any) -> type:
    return type("Their", (Fit,), methods)


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"loss": lambda *_: 3.0}, "loss() returned a float; must be a tensor of one element"),
        ({"loss": lambda *_: torch.zeros(4)}, "loss() returned a tensor of shape (4,)"),
        ({"loss": lambda *_: torch.zeros(())}, "loss() does not depend on the model's parameters"),
        ({"loss": lambda self, model, batch: model(batch["point"][0]).sum() / 0}, "the loss of the first 2 samples is"),
        ({"metrics": lambda *_: 3}, "metrics() returned a int; must be a dict of numbers"),
        ({"metrics": lambda *_: {"a": "b"}}, "metrics() returned what is no number"),
        ({"metrics": lambda *_: {"loss": 1}}, "metrics() returned 'loss'"),
        ({"samples": lambda *_: 0}, "samples() returned 0; must be a whole number above 0"),
        (
            {"loss": lambda self, model, batch: batch["nothing"]},
            "KeyError: 'nothing'\n    at tests/run/test_own_task.py",
        ),
        (
            {
                "loss": lambda self, model, batch: nn.functional.huber_loss(
                    model(batch["point"][0]), torch.zeros(2, 1).double()
                )
            },
            "or convert the batch with .float()\n    at loss.backward(), the backward pass of the loss",
        ),
    ],
)
def test_a_task_is_tried_out_and_leaves_no_trace(
    recipe: Own, methods: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(recipe(task=task_with(**methods), model=lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))))
    state, random = {k: v.clone() for k, v in task.model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(UserError, match=re.escape(said)):
        task.try_out()
    assert all(torch.equal(state[key], value) for key, value in task.model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and task.model.training
    assert all(p.grad is None for p in task.model.parameters())


def test_an_error_in_training_names_the_users_line(recipe: Own) -> None:
    class Breaks(Fit):
        steps = 0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            self.steps += model.training
            if self.steps > 2:
                raise ZeroDivisionError("on purpose")
            return super().loss(model, batch)

    (group,) = local_groups(1)
    trainer = Trainer(recipe(task=Breaks), group, record=CurrentStep(), evaluates=False)
    with pytest.raises(OwnCodeFailed, match=r"inner step 3 failed .*ZeroDivisionError: on purpose\n +at .*, in loss: "):
        trainer.run()
    group.close()


def test_nested_batches_are_moved_as_they_are() -> None:
    batch = {"a": (torch.ones(2), ["text", torch.ones(1)]), "b": 3, "c": torch.nn.utils.rnn.PackedSequence}
    there = moved(batch, torch.device("meta"))
    assert there["a"][0].is_meta and there["a"][1][1].is_meta
    assert (there["a"][1][0], there["b"], type(there["a"])) == ("text", 3, tuple)
