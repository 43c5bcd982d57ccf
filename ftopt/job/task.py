"""What a replica trains, apart from how: data, model, loss, and what an evaluation finds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ftopt.config.schema import Digits, Recipe, Text
from ftopt.data.corpus import Bytes, stdlib_bytes, text
from ftopt.data.digits import Draws, digits
from ftopt.data.seeds import seed_of
from ftopt.data.windows import Windows
from ftopt.job.model import build

_EVALUATION_WINDOWS = 128
_FINAL_WINDOWS = 512
_WINDOWS_AT_ONCE = 32


class Batches(Protocol):
    """An endless stream of training batches."""

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next one: inputs and targets."""


@dataclass(frozen=True)
class Score:
    """What an evaluation found.

    Args:
        loss: mean cross-entropy, nats a target.
        accuracy: share of samples whose target has the largest logit; None where nobody asks for it.
        samples: windows or images that it is the mean of.
    """

    loss: float
    accuracy: float | None
    samples: int


class Task(ABC):
    """A model that gives logits, and the data for it. Alike in all replicas, but for the seed of `batches`.

    Args:
        recipe: what to train. Seed torch before: the initial parameters come from its global generator.

    Raises:
        UserError: data or model cannot be had.
    """

    classifies: ClassVar[bool] = False
    """A sample has one target, and the share of right answers is asked for."""
    samples: int
    """Windows or images a batch."""
    tokens: int
    """Bytes a batch; an image counts as one."""

    def __init__(self, recipe: Recipe) -> None:
        self.model: nn.Module = build(recipe.model)
        self._autocast = recipe.train.autocast == "bf16"
        self.samples = recipe.data.batch_size

    @abstractmethod
    def batches(self, seed: int) -> Batches:
        """Training batches, drawn by a generator of this seed."""

    @abstractmethod
    def held_out(self, *, thorough: bool) -> Iterable[tuple[Tensor, Tensor]]:
        """Fixed batches to evaluate on; more of them for a thorough evaluation, the first and the last one."""

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's answer, (..., classes), fp32."""
        with torch.autocast("cpu", dtype=torch.bfloat16) if self._autocast else nullcontext():
            return torch.as_tensor(self.model(inputs)).float()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of a batch, in nats."""
        return _cross_entropy(self.logits(inputs), targets)

    @torch.no_grad()
    def score(self, *, thorough: bool) -> Score:
        """Evaluates the parameters that are in the model, on held-out data."""
        loss, right, samples = 0.0, 0, 0
        with _evaluating(self.model):
            for inputs, targets in self.held_out(thorough=thorough):
                logits = self.logits(inputs)
                loss += len(targets) * float(_cross_entropy(logits, targets))
                right += int((logits.argmax(-1) == targets).sum())
                samples += len(targets)
        return Score(loss / samples, right / samples if self.classifies else None, samples)


class NextByte(Task):
    """Text: the next byte of every place in a window of ``model.context`` bytes."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert not isinstance(recipe.data, Digits) and hasattr(recipe.model, "context")
        self._corpus = text(recipe.data.path) if isinstance(recipe.data, Text) else stdlib_bytes()
        self._context = int(recipe.model.context)
        self._seed = recipe.train.seed
        self.tokens = self.samples * self._context

    def batches(self, seed: int) -> Windows:
        """Windows at random places."""
        return self._windows(self._corpus.train, self.samples, seed)

    def held_out(self, *, thorough: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """512 windows, or 128 in between."""
        windows = self._windows(self._corpus.held_out, _WINDOWS_AT_ONCE, seed_of("held out", self._seed))
        for _ in range((_FINAL_WINDOWS if thorough else _EVALUATION_WINDOWS) // _WINDOWS_AT_ONCE):
            yield windows.batch()

    def _windows(self, data: Bytes, batch_size: int, seed: int) -> Windows:
        return Windows(data, context=self._context, batch_size=batch_size, seed=seed)


class WhichDigit(Task):
    """Images: the digit that each shows."""

    classifies = True

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._train, self._held_out = digits()
        self.tokens = self.samples

    def batches(self, seed: int) -> Draws:
        """Images drawn with replacement."""
        return Draws(self._train, batch_size=self.samples, seed=seed)

    def held_out(self, *, thorough: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """All images held out."""
        return self._held_out.in_order()


def task_of(recipe: Recipe) -> Task:
    """The task that the recipe's sections ``data`` and ``model`` describe."""
    return WhichDigit(recipe) if isinstance(recipe.data, Digits) else NextByte(recipe)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
