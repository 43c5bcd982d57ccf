"""What the examples of trainers share: data that nobody has to download, and the sizes of a job that ends soon."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

SYNC_EVERY, STEPS = 10, 60
STEP_S = float(os.environ.get("STEP_S", "0.02"))
"""Seconds to wait after each step: 0.6 leaves time to kill a replica by hand and start it again; with a trainer, 2."""


class Waves:
    """A data set: 16 numbers of a wave, and the one to predict."""

    random = False  # no random numbers are drawn for a sample

    def __init__(self, samples: int = 4_800) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(0, 1, 16) * (1 + index % 97) + index / 50
        return x.sin(), x[-1:].cos()


class Rules:
    """A data set for language models: sequences of 16 tokens, each of which follows from the one before it."""

    random = False

    def __init__(self, samples: int, *, start: int = 0) -> None:
        self._samples, self._start = samples, start

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._samples:
            raise IndexError(index)
        found = [(self._start + index) % 32]
        while len(found) < 16:
            found.append((found[-1] * 5 + 3) % 32)
        tokens = torch.tensor(found)
        return {"input_ids": tokens, "labels": tokens}


def net() -> nn.Module:
    """The model, the same in each replica."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def score(model: nn.Module) -> float:
    """The loss on fixed samples."""
    data = Waves()
    inputs, targets = map(torch.stack, zip(*(data[index] for index in range(200)), strict=True))
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(inputs), targets))
