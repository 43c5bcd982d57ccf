"""Small stable problems, and the inner optimizers. Both sides compute their gradients here: that is not under test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Inner = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

INNER: dict[str, Inner] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=5e-3, alpha=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def _bits(size: Iterable[int], seed: int, scale: float) -> Tensor:
    """Normal numbers that float64, float32 and bfloat16 all represent."""
    drawn = torch.randn(tuple(size), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * drawn).to(torch.bfloat16).double()


class Problem:
    """What is trained: a module that holds the parameters, and a loss of them. Sub-classes differ in both."""

    def module(self) -> nn.Module:
        """The parameters under their names, float32, the same in every replica."""
        module = self.layers()
        with torch.no_grad():
            for k, p in enumerate(module.parameters()):
                p.copy_(_bits(p.shape, 17 + k, 0.4))
        return module

    def layers(self) -> nn.Module:
        """The module with any values."""
        raise NotImplementedError

    def loss(self, parameters: Sequence[Tensor], replica: int, tick: int) -> Tensor:
        """The loss of a replica's batch of this tick, in the parameters' own precision."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Of the parameters, in order."""
        return [name for name, _ in self.layers().named_parameters()]


class Quadratic(Problem):
    """Parameters that are pulled to places that differ from replica to replica and tick to tick."""

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))

    def loss(self, parameters: Sequence[Tensor], replica: int, tick: int) -> Tensor:
        total = torch.zeros((), dtype=parameters[0].dtype)
        for k, p in enumerate(parameters):
            place = 0.7 * _bits(p.shape, 90 + k, 1.0) + 0.3 * _bits(p.shape, 1000 * tick + 10 * replica + k, 1.0)
            total = total + 0.5 * (0.5 + 0.25 * k) * (p - place.to(p.dtype)).square().sum()
        return total


class Linear(Problem):
    """Least squares."""

    def layers(self) -> nn.Module:
        return nn.Linear(6, 3)

    def loss(self, parameters: Sequence[Tensor], replica: int, tick: int) -> Tensor:
        x, y = _batch(replica, tick, parameters[0].dtype)
        return (functional.linear(x, *parameters) - y).square().mean()


class Mlp(Problem):
    """An embedding and four layers: blocks of unlike sizes, to be cut into fragments."""

    def layers(self) -> nn.Module:
        sizes = [(6, 8), (8, 7), (7, 5)]
        return nn.ModuleDict(
            {
                "table": nn.Embedding(5, 6),
                "layers": nn.ModuleList([nn.Linear(*size) for size in sizes]),
                "head": nn.Linear(5, 3),
            }
        )

    def loss(self, parameters: Sequence[Tensor], replica: int, tick: int) -> Tensor:
        table, *rest = parameters
        x, y = _batch(replica, tick, table.dtype)
        rows = torch.randint(0, 5, (len(x),), generator=torch.Generator().manual_seed(100 * tick + replica))
        hidden = x + functional.embedding(rows, table)
        for k in range(0, 6, 2):
            hidden = torch.tanh(functional.linear(hidden, rest[k], rest[k + 1]))
        return (functional.linear(hidden, rest[6], rest[7]) - y).square().mean()


def _batch(replica: int, tick: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _bits((12, 6), 7919 * tick + replica, 1.0)
    y = torch.sin(x[:, :3] + 0.3 * replica) + 0.1 * x[:, 3:]
    return x.to(dtype), y.to(dtype)


PROBLEMS: dict[str, Problem] = {"quadratic": Quadratic(), "linear": Linear(), "mlp": Mlp()}


def tokens(replica: int, tick: int) -> int:
    """Of a replica's batch."""
    return 10 * (replica + 1) + tick % 3


def noise(replica: int, tick: int, p: Tensor, k: int) -> Tensor:
    """What corrupts a replica's own copy of the agreed gradient of parameter ``k``."""
    return _bits(p.shape, 31 * tick + 1009 * replica + 7 * k, 0.05).to(p.dtype)


def set_rate(optimizer: Any, rate: float) -> None:
    """Of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
