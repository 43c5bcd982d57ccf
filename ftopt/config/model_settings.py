"""The section ``model`` of a recipe: a dataclass per kind of model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ftopt.config.checks import at_least, at_most
from ftopt.config.own_code import check_form
from ftopt.errors import UserError

_MOST_LAYERS, _MOST = 10_000, 1_000_000
"""Far beyond any model; with more, torch miscounts its bytes, or creating the layers takes hours."""


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """The GPT of `ftopt.config.models` (``model.name: gpt``).

    Args:
        layers, heads, width, dropout: the usual sizes.
        context: tokens per window.
        vocab: size of the vocabulary; 256 for bytes.
        tied: whether embedding and head share one matrix. Default false.
    """

    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    dropout: float = 0.0
    vocab: int = 256
    tied: bool = False

    def __post_init__(self) -> None:
        at_least("model", 1, layers=self.layers, heads=self.heads, width=self.width, context=self.context)
        at_least("model", 2, vocab=self.vocab)
        at_most("model", _MOST_LAYERS, layers=self.layers)
        at_most("model", _MOST, heads=self.heads, width=self.width)
        at_most("model", 100 * _MOST, context=self.context, vocab=self.vocab)
        if self.width % (2 * self.heads):
            raise UserError(
                f"model.width={self.width} with heads={self.heads}; the width must be a multiple of 2 * heads; "
                f"use width={max(1, round(self.width / (2 * self.heads))) * 2 * self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout={self.dropout:g}; must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class ConvnetConfig:
    """The convolutional net of `ftopt.config.models` (``model.name: convnet``), for images.

    Args:
        channels: of the first convolution; the second has twice as many.
        batch_norm: BatchNorm after each convolution.
    """

    channels: int = 16
    batch_norm: bool = False

    def __post_init__(self) -> None:
        at_least("model", 1, channels=self.channels)
        at_most("model", _MOST, channels=self.channels)


@dataclass(frozen=True, kw_only=True)
class FactoryConfig:
    """A model of the user's own (``model.name: factory``).

    Args:
        factory: ``package.module:function`` or ``FILE.py:function``, called with ``args``; returns a module. Without a
            ``task.factory`` it maps bytes or tokens (batch, time), int64, to logits (batch, time, vocabulary), digits
            (batch, 1, 8, 8), fp32, to logits (batch, 10), and the inputs of ``data.factory`` to logits.
        args: its keyword arguments.
        context: bytes or tokens per window; without effect on images and on ``data.factory``.
    """

    factory: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    context: int = 64

    def __post_init__(self) -> None:
        check_form("model.factory", self.factory)
        at_least("model", 1, context=self.context)


ModelConfig = GptConfig | ConvnetConfig | FactoryConfig
