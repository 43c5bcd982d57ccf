"""Your own images: the model, the data and nothing else; cross-entropy and accuracy are the default task.

    ftopt cp own_images         copies this file and own_images.yaml, to edit them
    ftopt run own_images.yaml

The images are made here, so that nothing is downloaded: 12 x 12 pixels with a disk, a square, a cross or a ring at a
random place, under noise. Put your own data set in the place of `Shapes`: anything with ``len()`` and ``[index]``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE = 12
KINDS = 4


class Shapes(Dataset[tuple[Tensor, int]]):
    """Sample i is an image (1, 12, 12), fp32, and its kind, 0 to 3."""

    random = False  # sample i is always the same, whoever loads it

    def __init__(self, count: int, seed: int, noise: float) -> None:
        self.count, self.seed, self.noise = count, seed, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        chance = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        kind = index % KINDS
        x, y = torch.randint(3, SIZE - 3, (2,), generator=chance).tolist()
        rows = torch.arange(SIZE).view(-1, 1) - y
        columns = torch.arange(SIZE).view(1, -1) - x
        far = rows.square() + columns.square()
        shape = (
            far <= 8,  # a disk
            (rows.abs() <= 2) & (columns.abs() <= 2),  # a square
            ((rows == 0) & (columns.abs() <= 3)) | ((columns == 0) & (rows.abs() <= 3)),  # a cross
            (far >= 5) & (far <= 10),  # a ring
        )[kind]
        return (shape.float() + self.noise * torch.randn(SIZE, SIZE, generator=chance)).unsqueeze(0), kind


def data(count: int = 4000, noise: float = 0.5) -> tuple[Shapes, Shapes]:
    """The images to train on, and those to evaluate on."""
    return Shapes(count, seed=1, noise=noise), Shapes(count // 10, seed=2, noise=noise)


def model(channels: int = 16) -> nn.Module:
    """Images (batch, 1, 12, 12) to logits (batch, 4)."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, KINDS),
    )
