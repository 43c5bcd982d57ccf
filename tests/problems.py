"""Small stable problems: another order of summation must not move 100 steps of training by more than 1e-6."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftopt.step.tensors.flat import flat_order

_SEEDING = threading.Lock()
_seed = torch.manual_seed


def _seed_alone(seed: int) -> torch.Generator:
    """Replaces `torch.manual_seed`: a test's threads share one generator, so that what one draws after it seeded this
    depends on the others, in few runs of many."""
    on_main = threading.current_thread() is threading.main_thread()
    ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("tests.")
    assert on_main or _SEEDING.locked() or not ours, "torch.manual_seed in a thread: build the model within `seeded`"
    return _seed(seed)


torch.manual_seed = _seed_alone


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """What is drawn within is the same on every thread: replicas that begin with unlike weights fetch those of one of
    them, and some miss the first round."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def alike(build: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """What ``build`` makes from a seed, the same each time: threads that another test has left may draw meanwhile."""
    made: dict[int, nn.Module] = {}

    @functools.wraps(build)
    def model(seed: int = 0) -> nn.Module:
        with _SEEDING:
            new = build(seed)
            return copy.deepcopy(made.setdefault(seed, new))

    return model


@alike
def linear_model(seed: int = 0) -> nn.Module:
    """Least squares: convex, so rounding errors shrink."""
    torch.manual_seed(seed)
    return nn.Linear(8, 4)


@alike
def mlp_model(seed: int = 0) -> nn.Module:
    """Two layers, smooth."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@alike
def deep_model(seed: int = 0) -> nn.Module:
    """Five blocks of unlike sizes, nearly linear: to be cut into fragments."""
    torch.manual_seed(seed)
    sizes = (8, 8, 6, 10, 8, 4)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers[:2], nn.Tanh(), *layers[2:])


@alike
def wide_model(seed: int = 0) -> nn.Module:
    """1496 parameters: each of two fragments is several codec blocks of 256 and a shorter one."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 20), nn.Linear(20, 4))


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "linear": linear_model,
    "mlp": mlp_model,
    "deep": deep_model,
    "wide": wide_model,
}

INNER: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@dataclass(frozen=True)
class Problem:
    """A model, its inner optimizer, and an endless stream of batches for each replica."""

    model: Callable[[int], nn.Module]
    inner: Callable[[Iterator[nn.Parameter]], Optimizer]

    def batch(self, replica: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Batch ``step`` of a replica: the same for every caller."""
        generator = torch.Generator().manual_seed(1_000_003 * replica + step)
        x = torch.randn(16, 8, generator=generator)
        y = torch.sin(x[:, :4] + x[:, 4:]) + 0.1 * torch.randn(16, 4, generator=generator)
        return x.to(dtype), y.to(dtype)

    def backward(self, model: nn.Module, replica: int, step: int) -> Tensor:
        """Loss of a batch, with the gradients left in the model."""
        x, y = self.batch(replica, step, next(model.parameters()).dtype)
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss


@dataclass(frozen=True)
class Pulled(Problem):
    """Parameters that are pulled to other places in each step, on any device.

    With `exact` as the inner optimizer every operation is elementwise and nothing is rounded that another machine
    could round otherwise: all devices compute the same bits.
    """

    device: str = "cpu"

    def backward(self, model: nn.Module, replica: int, step: int) -> Tensor:
        """The gradients are the parameters' distances from their places."""
        generator = torch.Generator().manual_seed(1_000_003 * replica + step)
        terms = []
        for p in model.parameters():
            apart = p - torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            terms.append((0.5 * apart * apart).sum())
        loss = torch.stack(terms).sum()
        loss.backward()
        return loss


def exact(parameters: Iterator[nn.Parameter]) -> Optimizer:
    """SGD that multiplies by powers of two alone."""
    return torch.optim.SGD(parameters, lr=2.0**-4, momentum=0.5)


def pulled(device: str, model: str = "deep", inner: Callable[[Iterator[nn.Parameter]], Optimizer] = exact) -> Pulled:
    """A model of `MODELS`, its layers unused, with its parameters on a device."""
    return Pulled(lambda seed: MODELS[model](seed).to(device), inner, device)


def problem(model: str = "linear", inner: str = "adamw") -> Problem:
    """One by its names."""
    return Problem(MODELS[model], INNER[inner])


def flat(model: nn.Module) -> Tensor:
    """All parameters in one fp32 tensor, copied."""
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def laid_out(model: nn.Module) -> Tensor:
    """The same, in the order of an anchor of one fragment."""
    return torch.cat([p.detach().float().reshape(-1) for _, p in flat_order(list(model.named_parameters()))])
