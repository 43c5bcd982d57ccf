"""What a replica trains: data, model, loss, and the scores of an evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate

from ftopt.config import own_code as own
from ftopt.config.data_settings import Digits, OwnData, StdlibBytes, Text, TokensConfig
from ftopt.config.model_settings import ConvnetConfig, FactoryConfig, GptConfig
from ftopt.config.models import build_model
from ftopt.config.objectives import Metrics, Objective, logits, moved, objective_of
from ftopt.config.opened import open_corpus, open_tokens
from ftopt.config.schema import Recipe
from ftopt.config.task_settings import CrossEntropyConfig, OwnTask
from ftopt.data.batches import Collate, MapStyle, samples_at, seeded
from ftopt.data.digits import CLASSES, digits
from ftopt.data.draws import Draws, windows
from ftopt.data.seeds import seed_of
from ftopt.data.tokens import TokenWindows
from ftopt.errors import UserError

_BYTES = 256
_WINDOWS = {False: 128, True: 512}
"""Number of windows of an evaluation, by whether it is thorough."""
_WINDOWS_AT_ONCE = 32
_IMAGES_AT_ONCE = 256
_TRIED = 2
"""Number of samples in the small batch that `Task.try_out` makes."""


Parts = tuple[nn.Module, Objective, bool]
"""The arguments of `Task`."""


@dataclass(frozen=True)
class Score:
    """The result of an evaluation: means over the ``samples``. ``loss``: nats per target for cross-entropy."""

    loss: float
    metrics: Metrics
    samples: int


class Task(ABC):
    """A model, its data, and the objective. Equal in all replicas, except for the seed of `batches`.

    Args:
        recipe: what to train.
        model: the model to train, from the recipe's section ``model``.
        objective: the objective to minimize, from the recipe's section ``task``.
        trusted: whether to accept a user's model unchecked. Else it must output the classes that the data need.

    Attributes:
        model: as given.
        called: the callable for batches: the model, or a wrapper with which several ranks train it together.
        device: the device of the model, and of batches.
        collate: makes a batch of a list of samples; None: torch's ``default_collate``.

    Raises:
        UserError: data or model are not available, or a user's model does not output what the data need.
    """

    collate: Collate | None = None
    _train: MapStyle

    def __init__(self, recipe: Recipe, model: nn.Module, objective: Objective, trusted: bool) -> None:
        self.model = self.called = model
        self.device = torch.device("cpu")
        self.batch_size = recipe.data.batch_size
        self._objective = objective
        self._autocast = recipe.train.autocast == "bf16"
        self._seed = recipe.train.seed
        named = recipe.task, recipe.data, recipe.model
        self._own = [part.factory for part in named if isinstance(part, OwnTask | OwnData | FactoryConfig)]
        self._checks_classes = isinstance(recipe.task, CrossEntropyConfig) and not trusted

    def dataset(self) -> MapStyle:
        """All training samples, for ``data.sampling: once``."""
        return self._train

    def batches(self, seed: int, share: tuple[int, int] = (0, 1)) -> Draws:
        """Batches drawn with replacement, this rank's ``share`` of each, for ``data.sampling: random``."""
        dataset, collate = self.dataset(), self.collate or default_collate

        def load(places: Tensor) -> Any:
            return collate(samples_at(dataset, places.tolist()))

        return Draws(len(dataset), load, batch_size=self.batch_size, seed=seed, share=share)

    @abstractmethod
    def held_out(self, *, thorough: bool) -> Iterable[Any]:
        """Fixed batches to evaluate on; more for a thorough evaluation (the first and the last one)."""

    def to(self, device: torch.device) -> None:
        """Moves the model and all later batches to ``device``. Call it before an optimizer gets the parameters."""
        self.device = device
        self.model.to(device)

    def loss(self, batch: Any) -> Tensor:
        """The objective's mean over a batch, as a scalar."""
        batch = batch if self.device.type == "cpu" else moved(batch, self.device)
        with self._precision():
            return self._objective.loss(self.called, batch)

    def samples(self, batch: Any) -> int:
        return self._objective.samples(batch)

    def tokens(self, batch: Any) -> int:
        """The number of tokens (bytes) in a batch; an image counts as one."""
        return self._objective.tokens(batch)

    @torch.no_grad()
    def score(self, *, thorough: bool) -> Score:
        """Evaluates the model's present parameters on held-out data. Random numbers are the same each time.
        OwnCodeFailed: the user's code raises."""
        loss, samples, metrics = 0.0, 0, defaultdict[str, float](float)
        with _evaluating(self.model), seeded(seed_of("evaluate", self._seed)), self.own_code("an evaluation"):
            for batch in self.held_out(thorough=thorough):
                count = self.samples(batch)
                loss += count * float(self.loss(batch))
                with self._precision():
                    found = self._objective.metrics(self.called, moved(batch, self.device))
                for name, value in found.items():
                    metrics[name] += count * value
                samples += count
        return Score(loss / samples, {name: total / samples for name, total in metrics.items()}, samples)

    @property
    def has_own_code(self) -> bool:
        """Whether model, data or task are the user's."""
        return bool(self._own)

    def own_code(self, what: str) -> AbstractContextManager[object]:
        """Reports errors of the user's code in the block, if the recipe has any, with the user's own line."""
        return own.failing(f"{what} failed ({', '.join(self._own)})") if self._own else nullcontext()

    def try_out(self, *, whole: bool = False) -> None:
        """Computes loss, gradients and metrics of a batch, and leaves the model and all random numbers as they were.

        Args:
            whole: make all calls of training and evaluation, on batches of their size, so that they find everything
                compiled. Default: only a small batch.

        Raises:
            UserError: the parts do not suit each other.
        """
        dataset, collate = self.dataset(), self.collate or default_collate
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        size = min(self.batch_size if whole else _TRIED, len(dataset))
        with seeded(0), own.failing(f"a batch of {size} samples fails ({', '.join(self._own)})", UserError):
            batch = collate([dataset[index] for index in range(size)])
            try:
                loss = self.loss(batch)
                if not torch.isfinite(loss):
                    got = float(loss.detach())
                    raise UserError(f"the loss of the first {size} samples is {got:g} at the start")
                loss.backward()  # type: ignore[no-untyped-call]
                self.tokens(batch)
                with _evaluating(self.model), torch.no_grad(), self._precision():
                    held_out = next(iter(self.held_out(thorough=False)))
                    self.samples(held_out)
                    if whole:
                        self.loss(held_out)
                    self._objective.metrics(self.called, moved(held_out, self.device))
            finally:
                self.model.zero_grad(set_to_none=True)
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(buffers[name])

    def classes(self, model: FactoryConfig, inputs: Tensor, shape: tuple[int, ...]) -> int:
        """The number of classes of a user's model: its output for ``inputs`` has ``shape`` plus one dimension."""
        given = f"{inputs.dtype} {tuple(inputs.shape)}"
        must = f"must give logits ({', '.join(map(str, shape))}, n), a number for each of n classes"
        with _evaluating(self.model), torch.no_grad(), torch.random.fork_rng([]):
            try:
                answer = logits(self.called, inputs)
            except Exception as error:
                text = own.described(error)
                raise UserError(f"model.factory={model.factory!r} fails on {given}: {text}; {must}") from error
        if answer.shape[:-1] != shape:
            raise UserError(f"model.factory={model.factory!r} gives {tuple(answer.shape)} for {given}; {must}")
        return answer.shape[-1]

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self._autocast else nullcontext()


class NextByte(Task):
    """Text: the next byte at each place of a window of ``model.context`` bytes."""

    def __init__(
        self, recipe: Recipe, parts: Parts, data: StdlibBytes | Text, model: GptConfig | FactoryConfig
    ) -> None:
        super().__init__(recipe, *parts)
        self._context = model.context
        if isinstance(model, FactoryConfig) and self._checks_classes:
            _enough(model, _vocabulary(self, model), _BYTES, "bytes")
        self._corpus = open_corpus(data, model.context)
        self._train = TokenWindows(self._corpus.train, self._context)

    def batches(self, seed: int, share: tuple[int, int] = (0, 1)) -> Draws:
        return windows(self._corpus.train, self._context, batch_size=self.batch_size, seed=seed, share=share)

    def held_out(self, *, thorough: bool) -> Iterator[Any]:
        seed = seed_of("held out", self._seed)
        draws = windows(self._corpus.held_out, self._context, batch_size=_WINDOWS_AT_ONCE, seed=seed)
        for _ in range(_WINDOWS[thorough] // _WINDOWS_AT_ONCE):
            yield draws.batch()


class NextToken(Task):
    """Files of tokens: the next token at each place of a window of ``model.context`` tokens."""

    def __init__(self, recipe: Recipe, parts: Parts, data: TokensConfig, model: GptConfig | FactoryConfig) -> None:
        super().__init__(recipe, *parts)
        vocab = model.vocab if isinstance(model, GptConfig) else None
        if isinstance(model, FactoryConfig) and self._checks_classes:
            vocab = _vocabulary(self, model)

        everything, held_out, cut = open_tokens(data, model.context, vocab=vocab, make=TokenWindows)
        self._train: MapStyle = everything if held_out is not None else Subset(everything, range(cut))
        self._held_out: MapStyle = held_out or Subset(everything, range(cut, len(everything)))

    def held_out(self, *, thorough: bool) -> Iterator[Any]:
        """512 windows spread over the held-out ones, or 128 if not thorough; all if there are fewer."""
        count = min(_WINDOWS[thorough], len(self._held_out))
        chosen = [number * len(self._held_out) // count for number in range(count)]
        for first in range(0, count, _WINDOWS_AT_ONCE):
            inputs, targets = default_collate([self._held_out[i] for i in chosen[first : first + _WINDOWS_AT_ONCE]])
            yield inputs, targets


class WhichDigit(Task):
    """Images: the digit that each one shows."""

    def __init__(self, recipe: Recipe, parts: Parts, model: ConvnetConfig | FactoryConfig) -> None:
        super().__init__(recipe, *parts)
        if isinstance(model, FactoryConfig) and self._checks_classes:
            _enough(model, self.classes(model, torch.zeros(1, 1, 8, 8), (1,)), CLASSES, "digits")
        self._images, self._held_out = digits()
        self._train = self._images

    def batches(self, seed: int, share: tuple[int, int] = (0, 1)) -> Draws:
        return Draws(len(self._images), self._images.__getitem__, batch_size=self.batch_size, seed=seed, share=share)

    def held_out(self, *, thorough: bool) -> Iterator[Any]:
        pixels, labels = (torch.split(tensor, _IMAGES_AT_ONCE) for tensor in self._held_out.tensors)
        return zip(pixels, labels, strict=True)


class OwnSamples(Task):
    """The user's own data."""

    def __init__(self, recipe: Recipe, parts: Parts, data: OwnData) -> None:
        super().__init__(recipe, *parts)
        found = own.call("data.factory", data.factory, data.args)
        given = f"data.factory={data.factory!r}"
        if not (isinstance(found, tuple | list) and len(found) == 2):
            raise UserError(
                f"{given} returned a {type(found).__name__}; must be a pair: the data set to train on, and the one to "
                "evaluate on"
            )
        for name, part in zip(("to train on", "to evaluate on"), found, strict=True):
            if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
                raise UserError(
                    f"{given}: the data set {name} is a {type(part).__name__}; must have positions, len(dataset) and "
                    "dataset[index]"
                )
            with own.failing(f"{given}: len() of the data set {name}", UserError):
                if not len(part):
                    raise UserError(f"{given}: the data set {name} is empty; must have at least one sample")
        self._train, self._held_out = found
        self.collate = getattr(self._train, "collate_fn", None)

    def held_out(self, *, thorough: bool) -> Iterator[Any]:
        """All held-out samples, in order."""
        samples, collate = self._held_out, getattr(self._held_out, "collate_fn", self.collate) or default_collate
        for first in range(0, len(samples), self.batch_size):
            yield collate([samples[index] for index in range(first, min(first + self.batch_size, len(samples)))])


def task_of(recipe: Recipe, parts: tuple[nn.Module, Objective] | None = None, *, trusted: bool = False) -> Task:
    """The task that the recipe's sections ``data``, ``model`` and ``task`` describe.

    Args:
        parts: model and objective. Default: those that the recipe names. Seed torch first: the model's initial
            parameters come from its global generator.
        trusted: see `Task`, also for errors.
    """
    network, objective = parts or (build_model(recipe.model), objective_of(recipe.task))
    given = (network, objective, trusted)
    match recipe.data, recipe.model:
        case OwnData() as data, _:
            return OwnSamples(recipe, given, data)
        case Digits(), ConvnetConfig() | FactoryConfig() as model:
            return WhichDigit(recipe, given, model)
        case TokensConfig() as data, GptConfig() | FactoryConfig() as model:
            return NextToken(recipe, given, data, model)
        case StdlibBytes() | Text() as data, GptConfig() | FactoryConfig() as model:
            return NextByte(recipe, given, data, model)
    raise UserError("; ".join(recipe.problems()))  # a recipe that `ftopt.config.loader` has not checked


def _vocabulary(task: Task, model: FactoryConfig) -> int:
    window = (1, model.context)
    return task.classes(model, torch.zeros(window, dtype=torch.int64), window)


def _enough(model: FactoryConfig, classes: int, needed: int, what: str) -> None:
    if classes < needed:
        raise UserError(f"model.factory={model.factory!r} gives {classes} classes; {what} need {needed}")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
