"""The anchor as a plain state dict."""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

import ftopt
from ftopt import Checkpoints, DiLoCo, LocalSGD, StreamingDiLoCo, SyncSGD, solo, wrap
from ftopt.checkpoint.export import export
from ftopt.checkpoint.reader import find, whole
from ftopt.cli.main import main
from ftopt.config.loader import dump, load
from ftopt.config.schema import Recipe
from ftopt.errors import UserError
from ftopt.fragments import Strided
from ftopt.methods import Method


class Mixed(nn.Module):
    """Tied embeddings, a frozen layer, bf16 and fp32, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(8, 6)
        self.hidden = nn.Linear(6, 6).to(torch.bfloat16)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.hidden(self.embed(x).to(torch.bfloat16)).float()
        return torch.as_tensor(self.head(self.norm(self.frozen(y))))


def trained(folder: Path, method: Method, *, steps: int = 8, freeze: bool = False) -> nn.Module:
    """Trains with a checkpoint; returns the model with the anchor of then in it. ``freeze``: a layer, half-way."""
    model = Mixed()
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = wrap(torch.optim.AdamW(trains, lr=0.01), model, method, group=solo())
    checkpoints = Checkpoints(folder, optimizer, every=1)
    with optimizer:
        for step in range(steps):
            optimizer.zero_grad()
            torch.manual_seed(step)
            nn.functional.cross_entropy(model(torch.arange(8)), torch.randperm(8)).backward()
            optimizer.step()
            checkpoints.step()
            model.hidden.requires_grad_(not freeze or step < steps // 2)
        optimizer.sync(propose=False)
        checkpoints.last()
        expected = Mixed()
        with optimizer.global_parameters():
            expected.load_state_dict(model.state_dict())
    checkpoints.close()
    return expected


METHODS = {
    "local_sgd": LocalSGD(sync_every=4),
    "averaged buffers": LocalSGD(sync_every=4, buffers="mean"),
    "streaming": StreamingDiLoCo(sync_every=4, fragments=Strided(n=2), delay=0),
    "sync_sgd": SyncSGD(),
}


@pytest.mark.parametrize("freeze", [False, True], ids=["", "a layer frozen after the start"])
@pytest.mark.parametrize("name", METHODS)
def test_load_state_dict_takes_it_with_every_name_and_dtype(tmp_path: Path, name: str, freeze: bool) -> None:
    expected = trained(tmp_path / "c", METHODS[name], freeze=freeze)
    path = tmp_path / "model.safetensors"
    export(find(tmp_path / "c"), path)
    state = load_file(path)
    assert state.keys() == expected.state_dict().keys()
    model = Mixed()
    model.load_state_dict(state, strict=True)
    for key, tensor in expected.state_dict().items():
        assert state[key].dtype == tensor.dtype and torch.equal(model.state_dict()[key], tensor), key
    assert model.head.weight is model.embed.weight
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_it_is_the_anchor_and_not_a_replicas_parameters(tmp_path: Path) -> None:
    """Outer momentum of 0.9: the anchor is another point than the parameters that were averaged."""
    model = Mixed()
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = wrap(torch.optim.AdamW(trains, lr=0.01), model, DiLoCo(sync_every=2), group=solo())
    checkpoints = Checkpoints(tmp_path / "c", optimizer, every=1)
    with optimizer:
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.arange(8)), torch.arange(8)).backward()
            optimizer.step()
            checkpoints.step()
        checkpoints.last()
        with optimizer.global_parameters():
            anchor = model.hidden.weight.detach().clone()
        assert not torch.equal(anchor, model.hidden.weight)
    checkpoints.close()
    before, _ = whole(tmp_path / "c")  # the fifth step is handed in and saved at the end
    assert torch.equal(export(find(before), tmp_path / "m.pt")["hidden.weight"], anchor)


def test_the_command_says_what_it_wrote_and_never_over_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "c", METHODS["local_sgd"])
    path = tmp_path / "model.safetensors"
    assert main(["export", str(tmp_path / "c"), str(path)]) == 0
    assert f"{path}: 12 tensors, " in capsys.readouterr().out
    assert main(["export", str(tmp_path / "c"), str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "other.pt")]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be written: No such file or directory"):
        export(find(tmp_path / "c"), tmp_path / "none" / "m.pt")


@pytest.mark.parametrize("name", ["committed-0-v*.safetensors", "replica-*.safetensors", "replica-*.json", "fixed.*"])
@pytest.mark.parametrize("harm", ["a flipped bit", "cut short", "missing"])
def test_a_damaged_file_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, harm: str
) -> None:
    trained(tmp_path / "c", METHODS["local_sgd"])
    before, newest = whole(tmp_path / "c")
    (path,) = newest.glob(name)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(raw if harm == "a flipped bit" else raw[:-1])
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ftopt: {path}: ") and error.endswith(f"; the previous one is sound: use {before}\n")
    assert error.count("\n") == 1 and not (tmp_path / "m.safetensors").exists()


def test_the_ending_decides_the_format_and_nothing_is_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = tmp_path / "a run", tmp_path / "model.pt"
    expected = trained(run / "checkpoint", LocalSGD(sync_every=4))
    assert main(["export", str(run), str(tmp_path / "model.bin")]) == 2
    assert "must be one of .safetensors, .pt, .pth" in capsys.readouterr().err
    assert main(["export", str(run), str(file)]) == 0
    state = torch.load(file, weights_only=True)
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items() if name != "scratch")
    assert main(["export", str(run), str(file)]) == 2
    assert "--force to replace it" in capsys.readouterr().err
    file.write_bytes(b"old")
    assert main(["export", str(run), str(file), "--force"]) == 0
    assert torch.load(file, weights_only=True).keys() == state.keys()
    assert main(["export", str(run), str(tmp_path), "--force"]) == 2


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_what_export_prints_loads_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str) -> None:
    run, file = tmp_path / "run", tmp_path / f"model{ending}"
    recipe = ftopt.recipe("diloco_bytes", ["model.layers=1", "model.heads=2", "model.width=8"])
    model = recipe.build_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, LocalSGD(sync_every=1), group=solo())
    checkpoints = Checkpoints(run / "checkpoint", optimizer, every=1)
    with optimizer:
        model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
        optimizer.step()
        checkpoints.step()
        checkpoints.last()
    checkpoints.close()
    (run / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    assert main(["export", str(run), str(file)]) == 0
    names: dict[str, Any] = {}
    exec(capsys.readouterr().out.partition("\n\n")[2], names)
    assert all(torch.equal(a, b) for a, b in zip(names["model"].parameters(), model.parameters(), strict=True))


def test_resume_takes_the_recipe_and_the_newest_checkpoint_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "größe, [1]"
    trained(run / "checkpoint", LocalSGD(sync_every=4))
    assert main(["resume", str(run)]) == 2
    assert "is not a run's folder: it has no recipe.yaml" in capsys.readouterr().err
    (run / "events.jsonl").touch()
    assert main(["resume", str(run)]) == 2
    assert "is the folder of a script's job" in capsys.readouterr().err
    (tmp_path / "launched").mkdir()
    (tmp_path / "launched" / "events.jsonl").touch()
    assert main(["export", str(tmp_path / "launched"), str(tmp_path / "m.pt")]) == 2
    assert "launched is the folder of a script's job, whose checkpoints are where the" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "m.pt")]) == 0, "this one holds checkpoints, too"
    capsys.readouterr()
    (run / "events.jsonl").unlink()
    recipe = load("localsgd_bytes", [f"checkpoint.dir={json.dumps(str(run / 'checkpoint'))}"])
    (run / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    started: list[Recipe] = []

    def start(arguments: argparse.Namespace) -> int:
        started.append(load(arguments.recipe, arguments.overrides))
        return 0

    monkeypatch.setattr("ftopt.cli.resume.run_recipe", start)
    assert main(["resume", str(run), "replicas=2"]) == 0
    newest = str(whole(run / "checkpoint")[-1])
    assert started[0] == replace(recipe, replicas=2, checkpoint=replace(recipe.checkpoint, dir=None, resume=newest))


def test_what_the_checkpoint_does_not_hold_is_said_when_it_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        model.register_buffer("places", torch.quantize_per_tensor(torch.arange(6.0), 0.5, 0, torch.quint8))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, LocalSGD(sync_every=1), group=solo())
    checkpoints = Checkpoints(tmp_path / "c", optimizer, every=1)
    with optimizer:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpoints.step()
        checkpoints.last()
    checkpoints.close()
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "m.safetensors")]) == 0
    assert "ftopt: not in the file: places is a " in capsys.readouterr().err
