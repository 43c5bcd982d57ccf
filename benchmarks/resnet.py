"""A small residual network for images of 8 x 8 pixels, for ``benchmarks paft``: ResNet-8 (arXiv 1512.03385, section
4.2, with n = 1): three stages of a basic block, with 16, 32 and 64 channels; 77,562 parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """``relu(x + norm(conv(relu(norm(conv(x))))))``, with a 1 x 1 convolution of ``x`` where the shape changes."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(narrow, wide, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        same = stride == 1 and narrow == wide
        self.short = nn.Identity() if same else nn.Conv2d(narrow, wide, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, narrow, side, side) to (batch, wide, side / stride, side / stride)."""
        return torch.relu(self.short(x) + self.body(x))


def model() -> nn.Module:
    """Images (batch, 1, 8, 8) to logits (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
