"""``~`` is the home folder wherever ftopt takes a path."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ftopt
from ftopt.checkpoint.reader import whole
from ftopt.cli import export, replica, report, resume
from ftopt.cli.cp import run as copy_recipe
from ftopt.common.paths import user_path
from ftopt.config.loader import load
from ftopt.config.shipped import locate
from ftopt.errors import UserError
from ftopt.net.tls import find_tls


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "state").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def test_checkpoints_lie_in_the_home_folder_and_are_resumed_from_anywhere(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for life, given in enumerate((None, None, "~/job7")):
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        method = ftopt.LocalSGD(sync_every=1)
        optimizer = ftopt.wrap(inner, model, method, group=ftopt.solo(), state_dir="~/state")
        checkpoints = ftopt.Checkpoints("~/job7" if given is None else "~/other", optimizer, every=1)
        assert checkpoints.resume(given) == bool(life)
        with optimizer:
            assert optimizer.start_step == min(life, 2)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert checkpoints.close()
        monkeypatch.chdir(tmp_path)
    assert whole(home / "job7") and whole(home / "other")
    assert not (tmp_path / "~").exists() and not (tmp_path / "work" / "~").exists()


def test_a_recipe_s_paths_may_begin_with_it(home: Path) -> None:
    keys = ("log.dir", "checkpoint.dir", "checkpoint.resume", "train.state_dir")
    recipe = load("diloco_bytes", [f"{key}=~/{key}" for key in keys])
    found = recipe.log.dir, recipe.checkpoint.dir, recipe.checkpoint.resume, recipe.train.state_dir
    assert found == tuple(str(home / key) for key in keys)
    assert load("diloco_bytes", ["log.dir=./runs/"]).log.dir == "./runs/"
    assert copy_recipe(argparse.Namespace(name="diloco_bytes", path="~/mine.yaml", full=False)) == 0
    assert locate("~/mine.yaml") == home / "mine.yaml"


@pytest.mark.parametrize(
    ("add", "line", "name"),
    [
        (replica.add, ["r", "--folder=~/it"], "folder"),
        (replica.add, ["r", "--token-file=~/it"], "token_file"),
        (export.add, ["~/it", "model.pt"], "checkpoint"),
        (resume.add, ["~/it"], "run"),
        (report.add, ["run", "--output=~/it"], "output"),
    ],
)
def test_an_option_s_path_may_begin_with_it(
    add: Callable[[argparse.ArgumentParser], None], line: list[str], name: str, home: Path
) -> None:
    parser = argparse.ArgumentParser()
    add(parser)
    assert getattr(parser.parse_args(line), name) == home / "it"


def test_a_path_of_the_environment_may_begin_with_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTOPT_CA", "~/ca.pem")
    with pytest.raises(UserError, match=str(home / "ca.pem")):
        find_tls().client()


def test_a_home_folder_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match="write the path without ~"):
        user_path("~no-such-user/runs")
