"""The section ``task`` of a recipe: the loss to minimize, and the metrics of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ftopt.config.own_code import check_form


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig:
    """Cross-entropy of the model's logits (``task.name: cross_entropy``, the default); for samples with one target also
    the accuracy."""


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A task of the user's own (``task.name: factory``).

    Args:
        factory: ``package.module:function`` or ``FILE.py:function``, called with ``args``; returns an object with a
            method ``loss(model, batch)``, a scalar tensor, the mean over the batch's samples, and any of

            - ``metrics(model, batch)``: name -> number, each the mean over the batch's samples; the model is in its
              evaluation mode. Default: none.
            - ``samples(batch)``: the number of samples. Default: the first dimension of the batch's first tensor.
            - ``tokens(batch)``: the count for a method with ``weights: tokens``. Default: the samples.
        args: its keyword arguments.
    """

    factory: str = ""
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_form("task.factory", self.factory)


TaskConfig = CrossEntropyConfig | OwnTask
