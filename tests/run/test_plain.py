"""Plain recipes: checked without torch, they are judged as with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftopt.config.loader import examine
from ftopt.config.model_settings import GptConfig
from ftopt.config.models import Transformer
from ftopt.config.optimizers import parameters_of
from ftopt.config.plain import Attempts, check_plain, gpt_parameters, is_plain
from ftopt.run.check import check


@pytest.mark.parametrize("settings", [GptConfig(), GptConfig(layers=3, heads=2, width=12, vocab=300, tied=True)])
def test_the_parameters_of_a_gpt_are_known_without_it(settings: GptConfig) -> None:
    assert gpt_parameters(settings) == parameters_of(Transformer(settings))


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.name=text", "data.path=nowhere", "log.dir=short.txt", "checkpoint.resume=nowhere"],
        ["data.name=text", "data.path=short.txt"],
        ["data.name=text", "data.path=long.txt", "train.state_dir=nowhere"],
        ["data.name=text", "data.path=long.txt", "data.batch_size=5000", "data.drop_last=true"],
        ["data.name=text", "data.path=long.txt", "data.batch_size=5000", "data.sampling=random"],
        ["data.name=text", "data.path=long.txt", "data.batch_size=5000", "ranks=2", "train.eval_every=-1"],
        ["data.name=text", "data.path=long.txt", "model.context=1000"],
        ["data.name=tokens", "data.path=long.txt", "data.dtype=uint8", "model.vocab=20"],
        ["data.name=tokens", "data.path=long.txt", "data.dtype=uint8", "model.vocab=256", "data.held_out=none"],
        ["inner={name: sgd, params: matrices}", "method.outer.lr=x", "data.name=text", "data.path=long.txt"],
        ["inner={name: adamw, params: nothing}", "data.name=text", "data.path=long.txt", "model.layers=0"],
        ["method={name: streaming_diloco, sync_every: 6, fragments: {n: 0}}", "data.name=text", "data.path=long.txt"],
        ["data.name=text", "data.path=long.txt", "train.seed=-1", "data.batch_size=5000", "data.drop_last=true"],
    ],
)
def test_a_plain_recipe_is_judged_without_torch_as_with_it(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_bytes(b"a" * 500)
    (tmp_path / "long.txt").write_bytes(b"the quick brown fox " * 500)
    reading = examine("diloco_bytes", overrides)
    assert reading.recipe is not None and is_plain(reading.recipe)
    attempt = Attempts(reading.wrong)
    check_plain(reading.recipe, attempt)
    found = check(reading.recipe, reading.wrong).errors
    assert attempt.errors == found
    assert reading.errors or found or "data.sampling=random" in overrides
