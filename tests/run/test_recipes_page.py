"""The program of ``docs/recipes.md`` runs as it stands there, and the page names every recipe and every key."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import ftopt
from ftopt.config.choices import CHOICES
from ftopt.config.parts import ScriptRecipe
from ftopt.config.schema import TrainConfig
from ftopt.config.shipped import shipped
from ftopt.errors import UserError
from tests.run.running import TINY, text

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_the_script_trains_by_the_recipe_it_shares_with_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PAGE.split("```python\n")[1].split("```")[0]
    small = [*TINY, text(tmp_path), "replicas=1"]
    monkeypatch.setattr(ftopt, "recipe", lambda name, over, made=ftopt.recipe: made(name, [*small, *over]))
    names: dict[str, Any] = {}
    exec(program, names)
    recipe, optimizer = names["recipe"], names["optimizer"]
    assert isinstance(recipe, ScriptRecipe)
    assert optimizer.status.committed_step == recipe.train.inner_steps == 40
    assert optimizer.param_groups[0]["lr"] < recipe.inner.lr, "the schedule is the recipe's"


def test_a_recipe_that_draws_at_random_has_no_loader(tmp_path: Path) -> None:
    recipe = ftopt.recipe("diloco_bytes", [*TINY, text(tmp_path), "data.sampling=random"])
    with pytest.raises(UserError, match=r"data\.sampling=random; a loader draws each sample once"):
        recipe.loader(recipe.build_task(), ftopt.solo())
    with pytest.raises(UserError, match=r"did you mean train\.seed"):
        ftopt.recipe("diloco_bytes", ["train.sed=3"])


def test_the_page_names_every_recipe_choice_and_setting() -> None:
    assert set(shipped()) <= set(re.findall(r"`(\w+)`", PAGE))
    for path, choices in CHOICES.items():
        assert all(f"`{name}`" in PAGE or f"`{name}:" in PAGE for name in choices), path
    for field in dataclasses.fields(TrainConfig):
        assert f"`train.{field.name}`" in PAGE
