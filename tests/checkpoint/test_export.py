"""The anchor as a plain state dict."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

from ftopt import Checkpoints, DiLoCo, LocalSGD, StreamingDiLoCo, SyncSGD, UserError, solo, wrap
from ftopt.checkpoint.export import export
from ftopt.checkpoint.reader import find, whole
from ftopt.cli.main import main
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
        optimizer.settle()
        checkpoints.last()
        expected = Mixed()
        with optimizer.outer_parameters():
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
        with optimizer.outer_parameters():
            anchor = model.hidden.weight.detach().clone()
        assert not torch.equal(anchor, model.hidden.weight)
    checkpoints.close()
    before, _ = whole(tmp_path / "c")  # the fifth step is handed in and saved at the end
    assert torch.equal(export(find(before), tmp_path / "m")["hidden.weight"], anchor)


def test_the_command_says_what_it_wrote_and_never_over_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "c", METHODS["local_sgd"])
    path = tmp_path / "model.safetensors"
    assert main(["export", str(tmp_path / "c"), str(path)]) == 0
    assert f"{path}: 12 tensors, " in capsys.readouterr().out
    assert main(["export", str(tmp_path / "c"), str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "other")]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be written: No such file or directory"):
        export(find(tmp_path / "c"), tmp_path / "none" / "m")


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
