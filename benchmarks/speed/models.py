"""The models used in the measurements."""

from __future__ import annotations

import torch
from torch import nn

from ftopt.config.model_settings import GptConfig
from ftopt.config.models import Transformer

BYTE_GPT = "byte GPT, 131k"
FIFTY = "50M"


def byte_gpt() -> nn.Module:
    """The one of the recipe ``diloco_bytes``: 2 layers, width 64."""
    torch.manual_seed(0)
    return Transformer(GptConfig())


def fifty_million() -> nn.Module:
    """A GPT of 50 million parameters: 16 layers, width 512."""
    torch.manual_seed(0)
    return Transformer(GptConfig(layers=16, heads=8, width=512, context=64))


def gpt2_124m() -> nn.Module:
    """The one of the recipe ``gpt2_124m``: GPT-2's shape, 123.6 million parameters."""
    torch.manual_seed(0)
    return Transformer(GptConfig(layers=12, heads=12, width=768, context=1024, vocab=50304, tied=True))


def of_size(parameters: int, tensors: int = 16) -> nn.Module:
    """Matrices, ``parameters`` elements in all."""
    torch.manual_seed(0)
    model = nn.Module()
    rows = max(1, parameters // tensors // 256)
    for i in range(tensors):
        model.register_parameter(f"w{i}", nn.Parameter(torch.randn(rows, parameters // tensors // rows) * 0.02))
    return model
