"""What the cells train: a small net on pairs of symbols, whose labels are noisy, and the methods to train it with."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ftopt
from ftopt import fragments, outer
from ftopt.methods import Method

SYMBOLS, WIDTH, HIDDEN, OUTPUTS = 6, 4, 16, 2
NOISE = 0.2
"""Deviation of the labels: the held-out loss cannot come below its square."""
BATCH = 48
"""Samples of all replicas in an inner step: with more replicas each has fewer, so that sizes compare."""
H = 3
RESULT_S = 1.0
"""Methods with a delay wait so long for a result."""
ROUNDS, ROUNDS_OF_GRADIENTS = 20, 14
"""Fewer for the methods that meet in every step; their rounds are those of the others, of `H` steps."""

_SGD = outer.SGD(lr=0.8, momentum=0.3, nesterov=True)
METHODS: dict[str, Callable[[], Method]] = {
    "DiLoCo": lambda: ftopt.DiLoCo(sync_every=H, outer=_SGD),
    "Streaming": lambda: _streaming(0),
    "Streaming-2": lambda: _streaming(2),
    "Decoupled": lambda: ftopt.DecoupledDiLoCo(
        sync_every=H,
        delay=1,
        wait_for_result_s=RESULT_S,
        adaptive_grace=0,
        fragments=fragments.Balanced(n=2),
        outer=_SGD,
    ),
    "LocalSGD": lambda: ftopt.LocalSGD(sync_every=H),
    "SlowMo": lambda: ftopt.SlowMo(sync_every=H, slow_momentum=0.2),
    "SyncSGD": lambda: ftopt.SyncSGD(verify_every=H),
    "PAFT": lambda: ftopt.PAFT(sync_every=H),
    "PAFT-1": lambda: ftopt.PAFT(sync_every=H, delay=1),
}


def _streaming(delay: int) -> Method:
    return ftopt.StreamingDiLoCo(
        sync_every=H, delay=delay, wait_for_result_s=RESULT_S, fragments=fragments.Strided(n=2), outer=_SGD
    )


def steps_of(method: str) -> int:
    """Inner steps of a run."""
    return H * (ROUNDS if METHODS[method]().gradients is None else ROUNDS_OF_GRADIENTS)


class Net(nn.Module):
    """Two embedded symbols -> a hidden layer -> numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.hidden = nn.Linear(2 * WIDTH, HIDDEN)
        self.out = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, pairs: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.hidden(self.symbols(pairs).flatten(1)))
        return self.out(hidden)  # type: ignore[no-any-return]


def made(seed: int) -> Net:
    """A net with these initial parameters, alike in all replicas."""
    torch.manual_seed(seed)
    return Net()


def truth() -> Tensor:
    """The labels of all pairs, without noise: the same in all runs."""
    chance = torch.Generator().manual_seed(1)
    first, second = (torch.randn(SYMBOLS, OUTPUTS, generator=chance) for _ in range(2))
    return (first[:, None] + second[None]) / 2**0.5


class Data:
    """A replica's batches of a run."""

    def __init__(self, replica: str, size: int, steps: int, seed: int) -> None:
        chance = torch.Generator().manual_seed(zlib.crc32(f"{seed} {replica}".encode()))
        self.inputs = torch.randint(SYMBOLS, (steps, BATCH // size, 2), generator=chance)
        labels = truth()[self.inputs[..., 0], self.inputs[..., 1]]
        self.labels = labels + NOISE * torch.randn(labels.shape, generator=chance)

    def loss(self, net: nn.Module, step: int) -> Tensor:
        """Of the batch of this step, from 0."""
        return nn.functional.mse_loss(net(self.inputs[step]), self.labels[step])


@torch.no_grad()
def held_out(net: nn.Module) -> float:
    """The expected loss over all pairs, with the labels' noise."""
    pairs = torch.cartesian_prod(torch.arange(SYMBOLS), torch.arange(SYMBOLS))
    return float(nn.functional.mse_loss(net(pairs), truth().flatten(0, 1))) + NOISE**2


def inner_of(name: str, net: nn.Module) -> torch.optim.Optimizer:
    """The inner optimizer, by its name."""
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.12, momentum=0.9, fused=True)
    return torch.optim.AdamW(net.parameters(), lr=0.06, betas=(0.9, 0.99), fused=True)


def rate(step: int, steps: int) -> float:
    """By which the peak rate is multiplied: it falls to a tenth."""
    return 1.0 - 0.9 * step / steps
