"""A program: what the replicas of a job do, action after action; how a seed makes one, and how it reads as a script."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import ftopt
from ftopt.methods import Method
from ftopt.triggers import AdaComm, LocalCondition

HALVES = ftopt.fragments.Balanced(n=2)
METHODS: dict[str, Method] = {
    "LocalSGD(sync_every=3)": ftopt.LocalSGD(sync_every=3),
    "LocalSGD(sync_every=2, buffers='mean')": ftopt.LocalSGD(sync_every=2, buffers="mean"),
    "LocalSGD(sync_every=9, trigger=LocalCondition(0.01))": ftopt.LocalSGD(
        sync_every=9, trigger=LocalCondition(0.01, check_every=1)
    ),
    "LocalSGD(sync_every=6, trigger=AdaComm(initial=2))": ftopt.LocalSGD(
        sync_every=6, trigger=AdaComm(initial=2, most=6)
    ),
    "DiLoCo(sync_every=3)": ftopt.DiLoCo(sync_every=3),
    "DiLoCo(sync_every=3, weights='tokens')": ftopt.DiLoCo(sync_every=3, weights="tokens"),
    "DiLoCo(sync_every=4, average_until_step=5)": ftopt.DiLoCo(sync_every=4, average_until_step=5),
    "DiLoCo(pacing=BySpeed(round_steps=8))": ftopt.DiLoCo(pacing=ftopt.methods.BySpeed(round_steps=8)),
    "SlowMo(sync_every=3)": ftopt.SlowMo(sync_every=3),
    "StreamingDiLoCo(sync_every=4, delay=1)": ftopt.StreamingDiLoCo(sync_every=4, delay=1, fragments=HALVES),
    "StreamingDiLoCo(sync_every=5, delay=3)": ftopt.StreamingDiLoCo(sync_every=5, delay=3, fragments=HALVES),
    "StreamingDiLoCo(sync_every=4, delay=2, mix=0.5)": ftopt.StreamingDiLoCo(
        sync_every=4, delay=2, mix=0.5, fragments=HALVES
    ),
    "StreamingDiLoCo(sync_every=3, delay=0)": ftopt.StreamingDiLoCo(sync_every=3, delay=0, fragments=HALVES),
    "DecoupledDiLoCo(sync_every=4, delay=2)": ftopt.DecoupledDiLoCo(sync_every=4, delay=2, fragments=HALVES),
    "PAFT(sync_every=3)": ftopt.PAFT(sync_every=3),
    "PAFT(sync_every=4, delay=1)": ftopt.PAFT(sync_every=4, delay=1),
    "SyncSGD()": ftopt.SyncSGD(),
    "SyncSGD(clip_norm=1.0, verify_every=2)": ftopt.SyncSGD(clip_norm=1.0, verify_every=2),
}
CODECS = ["fp32", "fp32", "bf16", "int8", "fp4", "top_k:0.3:8"]


def _two(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in _trained(model) if p.dim() > 1]
    rest = [p for p in _trained(model) if p.dim() <= 1]
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)]


class CountsInItsGroups(torch.optim.SGD):
    """As schedule-free optimizers and Prodigy do: what a step does depends on a count in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / math.sqrt(group["k"]))
        return loss


class CountsBesideItsParameters(torch.optim.SGD):
    """As MADGRAD does: a counter of its own under a key that is no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state.setdefault("k", torch.zeros(1, dtype=torch.long)).add_(1)
        return loss


class KeepsLists(torch.optim.SGD):
    """As SOAP does: lists of tensors, and None, in a parameter's state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                rows = state.setdefault("means", [torch.zeros(p.shape[0], dtype=p.dtype), None])
                rows[0].mul_(0.9).add_(p.grad.flatten(1).mean(1) if p.dim() > 1 else p.grad, alpha=0.1)
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(p.grad + rows[0].view(-1, *[1] * (p.dim() - 1)), alpha=group["lr"])
        return loss


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Without those of other dtypes, which torch does not unpickle with an optimizer."""
    return [p for p in model.parameters() if p.requires_grad]


INNER: dict[str, Callable[[nn.Module], Optimizer | list[Optimizer]]] = {
    "SGD(model.parameters(), lr=0.05, momentum=0.9)": lambda m: torch.optim.SGD(_trained(m), lr=0.05, momentum=0.9),
    "AdamW(model.parameters(), lr=1e-2)": lambda m: torch.optim.AdamW(_trained(m), lr=1e-2),
    "Adagrad(model.parameters(), lr=1e-2)": lambda m: torch.optim.Adagrad(_trained(m), lr=1e-2),
    "RMSprop(model.parameters(), lr=1e-3)": lambda m: torch.optim.RMSprop(_trained(m), lr=1e-3),
    "CountsInItsGroups(model.parameters(), lr=0.05)": lambda m: CountsInItsGroups(_trained(m), lr=0.05),
    "CountsBesideItsParameters(model.parameters(), lr=0.05, momentum=0.9)": lambda m: CountsBesideItsParameters(
        _trained(m), lr=0.05, momentum=0.9
    ),
    "KeepsLists(model.parameters(), lr=0.05)": lambda m: KeepsLists(_trained(m), lr=0.05),
    "[SGD(matrices, lr=0.05, momentum=0.9), AdamW(rest, lr=1e-2)]": _two,
}


def _mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6).bfloat16(), _ToFloat(), nn.Linear(6, 4))


TRAINED = torch.float32, torch.bfloat16
"""What of a model's parameters is trained and compared."""


class Holds(nn.Module):
    """A frozen tensor and a buffer of each dtype that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        some = torch.arange(6.0)
        kinds = {"float8": some.to(torch.float8_e4m3fn), "complex": some + 1j, "uint16": some.to(torch.uint16)}
        kinds |= {"double": some.double(), "flag": torch.tensor(True), "empty": torch.zeros(0, 3)}
        for name, tensor in kinds.items():
            self.register_buffer(f"{name}_buffer", tensor)
            self.register_parameter(f"of_{name}", nn.Parameter(tensor.clone(), requires_grad=False))
        self.register_buffer("sparse_buffer", torch.eye(3).to_sparse())  # no parameter: torch cannot copy a sparse one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _of_all_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), Holds(), nn.Tanh(), nn.Linear(6, 4))


class _ToFloat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Sequential(Linear(8, 6), Tanh(), Linear(6, 4))": lambda: nn.Sequential(
        nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)
    ),
    "Sequential(Linear(8, 6), BatchNorm1d(6), Linear(6, 4))": lambda: nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
    ),
    "Sequential(Linear(8, 6), Holds(), Tanh(), Linear(6, 4))": _of_all_dtypes,
    "Sequential(Linear(8, 6, dtype=bfloat16), ToFloat(), Linear(6, 4))": _mixed,
}


_lr = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR(optimizer, step_size=2, gamma=0.7)": lambda o: _lr.StepLR(o, step_size=2, gamma=0.7),
    "LambdaLR(optimizer, lambda step: 0.9**step)": lambda o: _lr.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR(optimizer, lambda step: 0.9)": lambda o: _lr.MultiplicativeLR(o, lambda step: 0.9),
    "MultiStepLR(optimizer, [2, 4])": lambda o: _lr.MultiStepLR(o, [2, 4]),
    "ConstantLR(optimizer, total_iters=3)": lambda o: _lr.ConstantLR(o, total_iters=3),
    "LinearLR(optimizer, total_iters=3)": lambda o: _lr.LinearLR(o, total_iters=3),
    "ExponentialLR(optimizer, 0.9)": lambda o: _lr.ExponentialLR(o, 0.9),
    "PolynomialLR(optimizer, total_iters=9)": lambda o: _lr.PolynomialLR(o, total_iters=9),
    "CosineAnnealingLR(optimizer, 9)": lambda o: _lr.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts(optimizer, 4)": lambda o: _lr.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR(optimizer, 0.001, 0.05, cycle_momentum=False)": lambda o: _lr.CyclicLR(
        o, 0.001, 0.05, cycle_momentum=False
    ),
    "OneCycleLR(optimizer, 0.05, total_steps=99, cycle_momentum=False)": lambda o: _lr.OneCycleLR(
        o, 0.05, total_steps=99, cycle_momentum=False
    ),
    "SequentialLR(optimizer, [ConstantLR, MultiStepLR], [3])": lambda o: _lr.SequentialLR(
        o, [_lr.ConstantLR(o, total_iters=2), _lr.MultiStepLR(o, [2, 4])], [3]
    ),
    "ChainedScheduler([ConstantLR, ExponentialLR])": lambda o: _lr.ChainedScheduler(
        [_lr.ConstantLR(o, total_iters=2), _lr.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau(optimizer, patience=0)": lambda o: _lr.ReduceLROnPlateau(o, patience=0),
}


@dataclass(frozen=True)
class Action:
    """One thing that a loop does: a name of `ftopt`'s `tests.programs.actions.ACTIONS`, and its argument."""

    name: str
    value: int | str = 0


@dataclass(frozen=True)
class Life:
    """One life of a replica. ``after``: it starts when the first replica has done so many actions."""

    replica: str
    after: int
    actions: tuple[Action, ...]


def constant(optimizer: Optimizer) -> Any:
    """A scheduler for replicas that exchange gradients, whose rates must be equal: a joiner's scheduler advances by the
    job's steps, and few programs step theirs."""
    return _lr.LambdaLR(optimizer, lambda step: 1.0)


@dataclass(frozen=True)
class Program:
    """What a seed makes. The first life is ``r0``'s, which is there to the end."""

    seed: int
    method: str
    codec: str
    inner: str
    model: str
    undo: bool
    lives: tuple[Life, ...]
    scheduler: str = next(iter(SCHEDULERS))
    collects: bool = True
    """Python's collector is on."""
    many_files: bool = False
    """More than 1,024 files are open."""

    def smaller(self) -> Iterator[Program]:
        """Programs with something left out: a life, half of a life's actions, one action; simpler settings."""
        for i in range(1, len(self.lives)):
            yield replace(self, lives=self.lives[:i] + self.lives[i + 1 :])
        for simpler in (
            replace(self, codec="fp32"),
            replace(self, undo=False),
            replace(self, model=next(iter(MODELS))),
            replace(self, inner=next(iter(INNER))),
            replace(self, scheduler=next(iter(SCHEDULERS))),
            replace(self, collects=True),
            replace(self, many_files=False),
        ):
            if simpler != self:
                yield simpler
        for i, life in enumerate(self.lives):
            count = len(life.actions)
            for size in sorted({max(1, count // 2), max(1, count // 4), 1}, reverse=True):
                for start in range(0, count, size):
                    actions = life.actions[:start] + life.actions[start + size :]
                    if len(actions) < count:
                        shorter = replace(life, actions=actions)
                        yield replace(self, lives=(*self.lives[:i], shorter, *self.lives[i + 1 :]))

    @property
    def size(self) -> int:
        return sum(1 + len(life.actions) for life in self.lives)


def program_of(seed: int) -> Program:
    """The program of a seed."""
    from tests.programs.actions import ACTIONS, draw

    def leaves(replica: str) -> bool:
        last = next(life for life in reversed(lives) if life.replica == replica)
        return any(ACTIONS[action.name].ends for action in last.actions)

    chance = random.Random(seed)
    method = chance.choice(list(METHODS))
    models = [name for name in MODELS if METHODS[method].buffers != "mean" or MODELS[name] is not _of_all_dtypes]

    def actions(least: int, most: int, dies: float) -> tuple[Action, ...]:
        return draw(chance, METHODS[method], chance.randint(least, most), dies=chance.random() < dies)

    first = chance.randint(2, 3)
    lives = [Life("r0", 0, actions(4, 12, 0.0))]
    for m in range(1, first):
        lives.append(Life(f"r{m}", 0, actions(2, 12, 0.5)))
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        free = sorted({life.replica for life in lives[1:] if leaves(life.replica)})
        name = chance.choice(free) if free and chance.random() < 0.7 else f"r{len(lives)}"
        lives.append(Life(name, chance.randint(1, 6), actions(1, 8, 0.3)))
    return Program(
        seed,
        method,
        chance.choice(CODECS),
        chance.choice(list(INNER)),
        chance.choice(models),
        chance.random() < 0.2,
        tuple(lives),
        chance.choice(list(SCHEDULERS)),
        chance.random() < 0.8,
        chance.random() < 0.2,
    )
