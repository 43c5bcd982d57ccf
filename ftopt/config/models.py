"""The model that a recipe names: a GPT, the convolutional net, or the user's own.

The GPT: pre-norm blocks, causal attention, rotary positions, no biases.

131,392 parameters with 2 layers, 4 heads, width 64: small enough to train on one CPU core at about 100 steps a second.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ftopt.config import own_code as own
from ftopt.config.model_settings import ConvnetConfig, GptConfig, ModelConfig
from ftopt.data.digits import CLASSES
from ftopt.errors import UserError


class Attention(nn.Module):
    """Causal multi-head attention; the rotary angles of `Transformer` rotate queries and keys."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            _turn(q, cos, sin), _turn(k, cos, sin), v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return torch.as_tensor(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """Attention, then a GELU network of four times the width, each on a normalized copy."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, dropout)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attention(self.norm_attention(x), cos, sin)
        return torch.as_tensor(x + self.mlp(self.norm_mlp(x)))


class Transformer(nn.Module):
    """Maps tokens to logits of the next token."""

    cos: Tensor
    sin: Tensor

    def __init__(self, settings: GptConfig) -> None:
        super().__init__()
        width, half = settings.width, settings.width // settings.heads // 2
        self.embed = nn.Embedding(settings.vocab, width)
        self.blocks = nn.ModuleList(Block(width, settings.heads, settings.dropout) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, settings.vocab, bias=False)
        # On the CPU even if parameters get no memory (`run/check.py`): there torch would import its compiler.
        positions, pairs = (torch.arange(n, device="cpu") for n in (settings.context, half))
        angles = torch.outer(positions, 10_000.0 ** (-pairs / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(_initial)
        if settings.tied:
            self.head.weight = self.embed.weight
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.attention.out, block.mlp[2]):
                nn.init.normal_(torch.as_tensor(last.weight), std=0.02 / (2 * settings.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 to logits (batch, time, vocab)."""
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return torch.as_tensor(self.head(self.norm(x)))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each pair (x_i, x_{i + half}) rotated by its angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


def _initial(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class ConvolutionalNet(nn.Module):
    """Two 3 x 3 convolutions, with ``channels`` and twice as many channels, the second with stride 2; then a linear
    layer. Each convolution is followed by BatchNorm if requested, and ReLU.

    For images of 8 x 8 pixels: 9,930 parameters with 16 channels, 10,026 with BatchNorm.
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


def build_model(settings: ModelConfig) -> nn.Module:
    """The model of a recipe. Seed torch first: the initial parameters come from its global generator. UserError: the
    user's factory cannot be imported, fails, or returns no module or one without trainable parameters."""
    if isinstance(settings, GptConfig):
        return Transformer(settings)
    if isinstance(settings, ConvnetConfig):
        return ConvolutionalNet(settings)
    model = own.call("model.factory", settings.factory, settings.args)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model.factory={settings.factory!r} returned a {type(model).__name__}; must be a torch.nn.Module"
        )
    if not any(p.requires_grad and p.numel() for p in model.parameters()):
        raise UserError(
            f"model.factory={settings.factory!r} returned a {type(model).__name__} without parameters to train; at "
            "least one must have requires_grad=True"
        )
    return model
