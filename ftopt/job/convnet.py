"""A small convolutional net for images of 8 x 8 pixels: 9,930 parameters with 16 channels, 10,026 with BatchNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ftopt.config.model import ConvnetConfig
from ftopt.data.digits import CLASSES


class ConvolutionalNet(nn.Module):
    """Two 3 x 3 convolutions, of ``channels`` and twice as many channels, the second one with stride 2; then a linear
    layer. ReLU behind each convolution, on request BatchNorm in between.

    Args:
        settings: the recipe's ``model`` section.
    """

    def __init__(self, settings: ConvnetConfig) -> None:
        super().__init__()
        narrow, wide = settings.channels, 2 * settings.channels
        self.body = nn.Sequential(
            nn.Conv2d(1, narrow, 3, padding=1),
            nn.BatchNorm2d(narrow) if settings.batch_norm else nn.Identity(),
            nn.ReLU(),
            nn.Conv2d(narrow, wide, 3, stride=2, padding=1),
            nn.BatchNorm2d(wide) if settings.batch_norm else nn.Identity(),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(wide * 4 * 4, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 1, 8, 8) fp32 to logits (batch, 10)."""
        return torch.as_tensor(self.head(self.body(pixels)))
