"""Low-rank adapters (LoRA) on a frozen GPT: only the adapters train, and only they travel.

    ftopt cp own_lora           copies this file and own_lora.yaml, to edit them
    ftopt run own_lora.yaml

ftopt averages the parameters with ``requires_grad=True`` and nothing else, so that freezing the base is enough. Every
replica makes the frozen base itself: from a file, or from the recipe's seed.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685), equation 3.
"""

from __future__ import annotations

import math

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ftopt


class LoRA(nn.Module):
    """``y = W x + (alpha / rank) B A x``, with W frozen; B starts at zero, so that y starts as ``W x``."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        self.a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x) + self.scale * (x @ self.a.T @ self.b.T))


def model(base: str | None = None, recipe: str = "diloco_bytes", rank: int = 8, alpha: float = 16.0) -> nn.Module:
    """The model of another recipe, frozen, with an adapter on each linear layer.

    Args:
        base: its parameters, a file that ``ftopt export`` has written. Default: those of the seed.
        recipe: whose model it is.
        rank, alpha: of the adapters.
    """
    network = ftopt.recipe(recipe).build_model()
    if base is not None:
        network.load_state_dict(load_file(base))
    network.requires_grad_(False)
    linear = [(name, part) for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    for name, part in linear:
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, LoRA(part, rank, alpha))
    return network
