"""The byte GPT and its schedules."""

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from ftopt.config.inner_settings import ConstantConfig, CosineConfig, factor
from ftopt.config.model_settings import FactoryConfig, GptConfig
from ftopt.config.models import build_model
from ftopt.errors import UserError


def test_a_byte_sees_only_what_was_before_it() -> None:
    torch.manual_seed(0)
    model = build_model(GptConfig(width=32, context=16)).eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-6)


def test_the_same_bytes_elsewhere_are_seen_by_their_distance() -> None:
    torch.manual_seed(0)
    model = build_model(GptConfig(layers=1, width=32, context=16)).eval()
    pair = torch.tensor([[1, 2]])
    apart = torch.tensor([[1, 7, 2]])
    assert not torch.allclose(model(pair)[:, -1], model(apart)[:, -1])


def test_one_seed_gives_one_model_of_the_documented_size() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build_model(GptConfig()))
    vectors = [nn.utils.parameters_to_vector(model.parameters()) for model in models]
    assert torch.equal(vectors[0], vectors[1])
    assert vectors[0].numel() == 131_392


def test_a_factory_gives_the_users_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = types.ModuleType("their_models")
    module.__dict__.update(small=lambda width=8: nn.Embedding(256, width), text=lambda: "no model")
    monkeypatch.setitem(sys.modules, "their_models", module)
    built = build_model(FactoryConfig(factory="their_models:small", args={"width": 4}))
    assert isinstance(built, nn.Embedding)
    for wrong in ("their_models:missing", "no_such_module:small", "their_models:text"):
        with pytest.raises(UserError, match=r"model\.factory"):
            build_model(FactoryConfig(factory=wrong))
    with pytest.raises(UserError, match=r"model\.factory"):
        build_model(FactoryConfig(factory="their_models:small", args={"depth": 4}))


def test_the_schedule_warms_up_and_decays_to_its_floor() -> None:
    cosine = CosineConfig(warmup=50, floor=0.1)
    assert factor(cosine, 0, 600) == pytest.approx(1 / 50)
    assert factor(cosine, 49, 600) == pytest.approx(1.0)
    assert factor(cosine, 325, 600) == pytest.approx(0.55)
    assert factor(cosine, 600, 600) == factor(cosine, 900, 600) == pytest.approx(0.1)
    assert factor(ConstantConfig(), 0, 600) == factor(ConstantConfig(warmup=5), 4, 600) == 1.0
