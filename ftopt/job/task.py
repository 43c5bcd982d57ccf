"""What a replica trains, apart from how: data, model, loss, and what an evaluation finds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset, default_collate

from ftopt.config.data import Digits, StdlibBytes, Text, TokensConfig
from ftopt.config.model import ConvnetConfig, FactoryConfig, GptConfig
from ftopt.config.schema import Recipe
from ftopt.data.batches import MapStyle
from ftopt.data.corpus import HELD_OUT, stdlib_bytes, text
from ftopt.data.digits import CLASSES, digits
from ftopt.data.draws import Draws, windows
from ftopt.data.seeds import seed_of
from ftopt.data.tokens import TokenWindows
from ftopt.errors import UserError
from ftopt.job.model import build_model

_BYTES = 256
_WINDOWS = {False: 128, True: 512}
"""Windows of an evaluation, thorough or not."""
_WINDOWS_AT_ONCE = 32
_IMAGES_AT_ONCE = 256


@dataclass(frozen=True)
class Score:
    """What an evaluation found.

    Args:
        loss: mean cross-entropy, nats a target.
        accuracy: share of samples whose target has the largest logit; None if the task does not report it.
        samples: windows or images that it is the mean of.
    """

    loss: float
    accuracy: float | None
    samples: int


class Task(ABC):
    """A model that gives logits, and the data for it. Alike in all replicas, but for the seed of `batches`.

    Args:
        recipe: what to train. Seed torch before: the initial parameters come from its global generator.

    Attributes:
        model: what is trained.
        called: what the batches go through: the model, or what makes several ranks train it together.

    Raises:
        UserError: data or model cannot be had, or a user's model does not give what the data need.
    """

    classifies: ClassVar[bool] = False
    """A sample has one target, and the share of right answers is asked for."""

    def __init__(self, recipe: Recipe) -> None:
        self.model: nn.Module = build_model(recipe.model)
        self.called = self.model
        self._autocast = recipe.train.autocast == "bf16"
        self.batch_size = recipe.data.batch_size

    @abstractmethod
    def dataset(self) -> MapStyle:
        """All samples to train on, inputs and targets: for ``data.sampling: once``."""

    def batches(self, seed: int, share: tuple[int, int] = (0, 1)) -> Draws:
        """Batches drawn with replacement, of each the ``share`` of this rank: for ``data.sampling: random``."""
        dataset = self.dataset()

        def load(places: Tensor) -> list[Tensor]:
            return list(default_collate([dataset[place] for place in places.tolist()]))

        return Draws(len(dataset), load, batch_size=self.batch_size, seed=seed, share=share)

    def tokens(self, inputs: Tensor) -> int:
        """Tokens (bytes) of a batch; an image counts as one."""
        return inputs.numel()

    @abstractmethod
    def held_out(self, *, thorough: bool) -> Iterable[tuple[Tensor, Tensor]]:
        """Fixed batches to evaluate on; more of them for a thorough evaluation, the first and the last one."""

    def classes(self, model: FactoryConfig, inputs: Tensor, shape: tuple[int, ...]) -> int:
        """How many a user's model tells apart: its answer to ``inputs`` is of ``shape`` and one dimension more."""
        given = f"{inputs.dtype} {tuple(inputs.shape)}"
        must = f"must give logits ({', '.join(map(str, shape))}, n), a number for each of n classes"
        with _evaluating(self.model), torch.no_grad(), torch.random.fork_rng([]):
            try:
                answer = self.logits(inputs)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                raise UserError(f"model.factory={model.factory!r} fails on {given}: {text}; {must}") from error
        if answer.shape[:-1] != shape:
            raise UserError(f"model.factory={model.factory!r} gives {tuple(answer.shape)} for {given}; {must}")
        return answer.shape[-1]

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's answer, (..., classes), fp32."""
        with torch.autocast("cpu", dtype=torch.bfloat16) if self._autocast else nullcontext():
            return torch.as_tensor(self.called(inputs)).float()

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

    def __init__(self, recipe: Recipe, data: StdlibBytes | Text, model: GptConfig | FactoryConfig) -> None:
        super().__init__(recipe)
        self._context = model.context
        self._seed = recipe.train.seed
        if isinstance(model, FactoryConfig):
            _enough(model, _vocabulary(self, model), _BYTES, "bytes")
        self._corpus = text(data.path) if isinstance(data, Text) else stdlib_bytes()

    def dataset(self) -> TokenWindows:
        return TokenWindows(self._corpus.train, self._context)

    def batches(self, seed: int, share: tuple[int, int] = (0, 1)) -> Draws:
        return windows(self._corpus.train, self._context, batch_size=self.batch_size, seed=seed, share=share)

    def held_out(self, *, thorough: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """512 windows, or 128 in between."""
        seed = seed_of("held out", self._seed)
        draws = windows(self._corpus.held_out, self._context, batch_size=_WINDOWS_AT_ONCE, seed=seed)
        for _ in range(_WINDOWS[thorough] // _WINDOWS_AT_ONCE):
            yield draws.batch()


class NextToken(Task):
    """Files of tokens: the next token of every place in a window of ``model.context`` tokens."""

    def __init__(self, recipe: Recipe, data: TokensConfig, model: GptConfig | FactoryConfig) -> None:
        super().__init__(recipe)
        vocab = model.vocab if isinstance(model, GptConfig) else _vocabulary(self, model)

        def tokens(path: str) -> TokenWindows:
            return TokenWindows(path, model.context, dtype=data.dtype, skip_bytes=data.skip_bytes, vocab=vocab)

        everything = tokens(data.path)
        self._train: MapStyle = everything
        self._held_out: MapStyle
        if data.held_out is not None:
            self._held_out = tokens(data.held_out)
            return
        cut = int(len(everything) * (1 - HELD_OUT))
        if not cut:
            raise UserError(f"data.path={data.path!r} has a single window; give more tokens, or data.held_out")
        self._train = Subset(everything, range(cut))
        self._held_out = Subset(everything, range(cut, len(everything)))

    def dataset(self) -> MapStyle:
        return self._train

    def held_out(self, *, thorough: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """512 windows spread over the held-out ones, or 128 in between; all if there are fewer."""
        count = min(_WINDOWS[thorough], len(self._held_out))
        chosen = [number * len(self._held_out) // count for number in range(count)]
        for first in range(0, count, _WINDOWS_AT_ONCE):
            inputs, targets = default_collate([self._held_out[i] for i in chosen[first : first + _WINDOWS_AT_ONCE]])
            yield inputs, targets


class WhichDigit(Task):
    """Images: the digit that each shows."""

    classifies = True

    def __init__(self, recipe: Recipe, model: ConvnetConfig | FactoryConfig) -> None:
        super().__init__(recipe)
        if isinstance(model, FactoryConfig):
            _enough(model, self.classes(model, torch.zeros(1, 1, 8, 8), (1,)), CLASSES, "digits")
        self._train, self._held_out = digits()

    def dataset(self) -> MapStyle:
        return self._train

    def batches(self, seed: int, share: tuple[int, int] = (0, 1)) -> Draws:
        return Draws(len(self._train), self._train.__getitem__, batch_size=self.batch_size, seed=seed, share=share)

    def held_out(self, *, thorough: bool) -> Iterator[tuple[Tensor, Tensor]]:
        pixels, labels = (torch.split(tensor, _IMAGES_AT_ONCE) for tensor in self._held_out.tensors)
        return zip(pixels, labels, strict=True)

    def tokens(self, inputs: Tensor) -> int:
        return len(inputs)


def task_of(recipe: Recipe) -> Task:
    """The task that the recipe's sections ``data`` and ``model`` describe.

    Raises:
        UserError: see `Task`.
    """
    match recipe.data, recipe.model:
        case Digits(), ConvnetConfig() | FactoryConfig() as model:
            return WhichDigit(recipe, model)
        case TokensConfig() as data, GptConfig() | FactoryConfig() as model:
            return NextToken(recipe, data, model)
        case StdlibBytes() | Text() as data, GptConfig() | FactoryConfig() as model:
            return NextByte(recipe, data, model)
    raise UserError("; ".join(recipe.problems()))  # of a recipe that `ftopt.config.loader` has not seen


def _vocabulary(task: Task, model: FactoryConfig) -> int:
    window = (1, model.context)
    return task.classes(model, torch.zeros(window, dtype=torch.int64), window)


def _enough(model: FactoryConfig, classes: int, needed: int, what: str) -> None:
    if classes < needed:
        raise UserError(f"model.factory={model.factory!r} gives {classes} classes; {what} need {needed}")


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
