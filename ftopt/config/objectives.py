"""The loss to minimize and the metrics of an evaluation: cross-entropy, or the user's own task.

A batch is any nested structure of tensors. The defaults for whatever a task may leave out are here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ftopt.config import own_code as own
from ftopt.config.task_settings import CrossEntropyConfig, TaskConfig
from ftopt.errors import UserError

Metrics = dict[str, float]


class CrossEntropy:
    """Cross-entropy of the model's logits (batch, ..., classes) for the inputs, with targets (batch, ...), int64."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean, in nats per target."""
        inputs, targets = _pair(batch)
        return functional.cross_entropy(logits(model, inputs).flatten(0, -2), targets.flatten())

    def metrics(self, model: nn.Module, batch: Any) -> Metrics:
        """The accuracy, if a sample has one target."""
        inputs, targets = _pair(batch)
        if targets.dim() != 1:
            return {}
        return {"accuracy": float((logits(model, inputs).argmax(-1) == targets).float().mean())}

    def tokens(self, batch: Any) -> int:
        """The number of elements of the inputs; a sample with one target counts as one."""
        inputs, targets = _pair(batch)
        return len(inputs) if targets.dim() == 1 else int(inputs.numel())


def _pair(batch: Any) -> tuple[Any, Tensor]:
    if not (isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)):
        raise UserError(
            f"a batch is {_kind(batch)}; for cross-entropy it must be a pair: inputs, and targets as a tensor; let the "
            "data set return such pairs, or give a task.factory"
        )
    inputs, targets = batch
    if targets.is_floating_point() or targets.dtype is torch.bool:
        raise UserError(
            f"the targets of a batch are {targets.dtype} {tuple(targets.shape)}; the loss is cross-entropy, as in each "
            "recipe without a section task, and its targets are numbers of classes, int64; for another loss give your "
            "own, task.factory=FILE.py:function (docs/recipes.md), or convert the targets with .long()"
        )
    return inputs, targets


def _kind(batch: Any) -> str:
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)} items"
    return f"a {type(batch).__name__}"


def logits(model: nn.Module, inputs: Any) -> Tensor:
    """The model's answer, fp32."""
    return torch.as_tensor(model(inputs)).float()


class Objective:
    """A checked task, with defaults for methods that it leaves out.

    Args:
        task: an object with the methods of `ftopt.config.task_settings.OwnTask`.
        name: its name in messages.
    """

    def __init__(self, task: Any, name: str) -> None:
        self.name = name
        self._task = task
        if not callable(getattr(task, "loss", None)):
            raise UserError(
                f"{name} gives a {type(task).__name__}; must be an object with a method loss(model, batch), and "
                "metrics(model, batch) if there is more to report"
            )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A scalar, with a gradient if gradients are enabled."""
        loss = self._task.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UserError(f"{self.name}: loss() returned {got}; must be a tensor of one element, the batch's mean")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError(f"{self.name}: loss() does not depend on the model's parameters; compute it with the model")
        return loss.reshape(())

    def metrics(self, model: nn.Module, batch: Any) -> Metrics:
        """Name -> number."""
        if not hasattr(self._task, "metrics"):
            return {}
        found = self._task.metrics(model, batch)
        if not isinstance(found, Mapping):
            raise UserError(f"{self.name}: metrics() returned a {type(found).__name__}; must be a dict of numbers")
        try:
            numbers = {str(key): float(value) for key, value in found.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.name}: metrics() returned what is no number: {error}") from None
        if "loss" in numbers:
            raise UserError(f"{self.name}: metrics() returned 'loss', which is loss() itself; use another name")
        return numbers

    def samples(self, batch: Any) -> int:
        if hasattr(self._task, "samples"):
            return self._counted("samples", self._task.samples(batch))
        first = next(tensors_of(batch), None)
        if first is None or not first.dim():
            raise UserError(
                f"{self.name}: a batch is a {type(batch).__name__} without a tensor that has a dimension; which number "
                "of samples it has is not known: give the task a method samples(batch)"
            )
        return len(first)

    def tokens(self, batch: Any) -> int:
        """The count for the weights of contributions."""
        if not hasattr(self._task, "tokens"):
            return self.samples(batch)
        return self._counted("tokens", self._task.tokens(batch))

    def _counted(self, what: str, count: Any) -> int:
        if isinstance(count, bool) or not isinstance(count, int | float | Tensor) or not 0 < float(count) < math.inf:
            raise UserError(f"{self.name}: {what}() returned {count!r:.60}; must be a whole number above 0")
        return int(count)


def objective_of(settings: TaskConfig) -> Objective:
    """The task that a recipe names. UserError: the user's factory fails, or returns no task."""
    if isinstance(settings, CrossEntropyConfig):
        return Objective(CrossEntropy(), "task.name=cross_entropy")
    name = f"task.factory={settings.factory!r}"
    return Objective(own.call("task.factory", settings.factory, settings.args), name)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of a nested structure, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_of(getattr(batch, field.name))


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on ``device``. Objects that are no containers and have no method ``to`` stay
    unchanged."""
    if hasattr(batch, "to") and not isinstance(batch, type):
        return batch.to(device, non_blocking=True) if isinstance(batch, Tensor) else batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(item, device) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: moved(getattr(batch, name), device) for name in names})
    return batch
