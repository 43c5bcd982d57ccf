"""The method in ``docs/methods.md`` under "Your own method" does what it says, in Python and in a
recipe. The page itself is run by ``tests/test_pages.py``.
"""

from __future__ import annotations

import sys
import types
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

from ftopt.config.loader import dump, load
from ftopt.errors import UserError
from tests.optimizer.running import train_and_look
from tests.pages import ROOT, programs
from tests.problems import problem

PAGE = ROOT / "docs" / "methods.md"
REPLICAS, H = 3, 5


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the method."""
    [module] = [block for block in programs(PAGE) if "file" in block.marks]
    made = types.ModuleType("sign_momentum")
    monkeypatch.setitem(sys.modules, "sign_momentum", made)
    exec(module.text, made.__dict__)
    return made


def test_it_is_its_equation_on_every_replica(page: Any) -> None:
    task = problem("mlp", "sgd")
    method = page.SignMomentum(sync_every=H, lr=0.01, beta=0.5)
    models = [task.model(0) for _ in range(REPLICAS)]
    inner = [task.inner(model.parameters()) for model in models]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    momentum = [torch.zeros_like(a) for a in anchor]
    for step in range(4 * H):
        for m, model in enumerate(models):
            inner[m].zero_grad()
            task.backward(model, m, step)
            inner[m].step()
        if (step + 1) % H == 0:
            for i, a in enumerate(anchor):
                delta = sum((a - list(model.parameters())[i].detach()) * (1 / REPLICAS) for model in models)
                momentum[i] = 0.5 * momentum[i] + 0.5 * delta
                anchor[i] = a - 0.01 * momentum[i].sign()
                for model in models:
                    list(model.parameters())[i].data.copy_(anchor[i])
    for trained in train_and_look(task, method, replicas=REPLICAS, steps=4 * H):
        for ours, expected in zip(trained.anchor, anchor, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_a_recipe_names_it(page: Any, tmp_path: Path) -> None:
    recipe = load("diloco_bytes", ["method={name: sign_momentum.SignMomentum, sync_every: 50, lr: 0.002}"])
    assert recipe.method == page.SignMomentum(sync_every=50, lr=0.002)
    written = tmp_path / "recipe.yaml"
    written.write_text(dump(recipe), encoding="utf-8")
    assert load(str(written)) == recipe
    with pytest.raises(FrozenInstanceError):
        recipe.method.lr = 1.0


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{name: sign_momentum.SignMomentum, bata: 0.5}", "method.bata: unknown key; did you mean method.beta?"),
        ("{name: sign_momentum.SignMomentum, beta: 2}", "beta=2.0; must be in [0, 1)"),
        ("{name: sign_momentum.Missing}", "method.name='sign_momentum.Missing' cannot be imported"),
        ("{name: no.such.module.Class}", "method.name='no.such.module.Class' cannot be imported"),
        ("{name: sign_momentum.Tensor}", "method.name='sign_momentum.Tensor' is not a method"),
    ],
)
def test_a_recipe_says_what_is_wrong_with_it(page: Any, section: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load("diloco_bytes", [f"method={section}"])
    assert said in str(caught.value)
