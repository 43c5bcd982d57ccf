"""The inner optimizers of a recipe: which parameters each one trains, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ftopt.config.inner_settings import AdamConfig, AdamWConfig, InnerConfig, MuonConfig, SgdConfig, TorchConfig
from ftopt.config.loader import load
from ftopt.config.model_settings import GptConfig
from ftopt.config.models import build_model
from ftopt.config.optimizers import inner_optimizers
from ftopt.errors import UserError
from tests.run.running import TINY, text
from tests.run.test_task import data_of, trained
from tests.versions import needs_muon


def model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(GptConfig(layers=1, heads=2, width=16, context=16))


def names(net: nn.Module, *sections: InnerConfig) -> list[list[str]]:
    found = {id(p): name for name, p in net.named_parameters()}
    made = inner_optimizers(sections, net)
    return [[found[id(p)] for group in optimizer.param_groups for p in group["params"]] for optimizer in made]


@needs_muon
def test_muon_has_the_matrices_and_adamw_the_rest() -> None:
    head, matrices, rest = names(model(), AdamWConfig(params="head"), MuonConfig(), AdamWConfig())
    assert head == ["head.weight"]
    assert matrices == [f"blocks.0.{part}.weight" for part in ("attention.qkv", "attention.out", "mlp.0", "mlp.2")]
    assert rest == ["embed.weight", "blocks.0.norm_attention.weight", "blocks.0.norm_mlp.weight", "norm.weight"]


def test_a_pattern_takes_what_it_matches_and_frozen_parameters_are_nobodys() -> None:
    net = model()
    net.get_submodule("embed").requires_grad_(False)
    norms, rest = names(net, SgdConfig(params="*norm*"), SgdConfig())
    assert norms == ["blocks.0.norm_attention.weight", "blocks.0.norm_mlp.weight", "norm.weight"]
    assert "embed.weight" not in rest and len(rest) == 5


def test_norms_and_biases_are_not_decayed_on_request() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    (optimizer,) = inner_optimizers([AdamWConfig(weight_decay=0.1, decay="weights")], net)
    decays = [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert decays == [(0.1, 1), (0.0, 3)]
    (optimizer,) = inner_optimizers([AdamWConfig(weight_decay=0.1)], net)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("section", "cls", "settings"),
    [
        (AdamWConfig(lr=0.1, betas=[0.8, 0.9]), torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9)}),
        (AdamConfig(weight_decay=0.2), torch.optim.Adam, {"weight_decay": 0.2}),
        (SgdConfig(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (
            TorchConfig(cls="torch.optim.RMSprop", lr=0.3, args={"alpha": 0.5}),
            torch.optim.RMSprop,
            {"lr": 0.3, "alpha": 0.5},
        ),
    ],
)
def test_each_name_is_its_class_with_its_settings(section: InnerConfig, cls: type, settings: dict[str, object]) -> None:
    (optimizer,) = inner_optimizers([section], model())
    assert type(optimizer) is cls
    assert settings.items() <= optimizer.param_groups[0].items()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            [SgdConfig(params="blocks")],
            r"leaves 3 parameters out: embed\.weight, norm\.weight, head\.weight; add a section",
        ),
        ([SgdConfig(), SgdConfig(params="head")], r"inner\[1\]\.params='head'; no parameter is left for it \(none\)"),
        ([SgdConfig(params="haed")], r"inner\.params='haed'; no parameter is left for it \(embed\.weight, "),
        (
            [TorchConfig(cls="torch.optim.Adm")],
            r"inner\.cls='torch\.optim\.Adm' cannot .* you mean Adam\?",
        ),
        ([TorchConfig(cls="torch.nn.Linear")], r"is not a torch\.optim\.Optimizer"),
        ([TorchConfig(cls="torch.optim.LBFGS")], r"calls for the loss several times"),
        ([TorchConfig(cls="torch.optim.RMSprop", args={"alpa": 1})], r"inner: RMSprop for .*unexpected keyword"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_with_what_to_do(sections: list[InnerConfig], said: str) -> None:
    with pytest.raises(UserError, match=said):
        inner_optimizers(sections, model())


@needs_muon
def test_muon_says_which_tensors_it_refuses() -> None:
    with pytest.raises(UserError, match=r"inner: Muon for embed\.weight.*2D"):
        inner_optimizers([MuonConfig(params="rest")], model())


@needs_muon
def test_a_job_of_muon_beside_adamw_learns_and_each_follows_its_own_schedule(tmp_path: Path) -> None:
    inner = "inner=[{name: muon, lr: 0.02, schedule: {name: cosine, warmup: 10, floor: 0.0}}, {name: adamw, lr: 3e-3}]"
    settings = [s for s in TINY if not s.startswith("inner.")]
    told = trained(load("diloco_bytes", [*settings, text(tmp_path), "train.inner_steps=60", inner]), 2)
    first, *_, last = data_of(told["r0"], "evaluate")
    assert last["loss"] < 0.75 * first["loss"]
    assert len({data["anchor_digest"] for events in told.values() for data in data_of(events, "end")}) == 1
