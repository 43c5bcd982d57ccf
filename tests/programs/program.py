"""A program: what the replicas of a job do, action after action; how a seed makes one, and how it reads as a script."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

import ftopt
from ftopt.triggers import AdaComm, LocalCondition

HALVES = ftopt.fragments.Balanced(n=2)
METHODS: dict[str, ftopt.Method] = {
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
    "DiLoCo(pacing=BySpeed(round_steps=8))": ftopt.DiLoCo(sync_every=None, pacing=ftopt.BySpeed(round_steps=8)),
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
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)]


INNER: dict[str, Callable[[nn.Module], Optimizer | list[Optimizer]]] = {
    "SGD(model.parameters(), lr=0.05, momentum=0.9)": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "AdamW(model.parameters(), lr=1e-2)": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "Adagrad(model.parameters(), lr=1e-2)": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "RMSprop(model.parameters(), lr=1e-3)": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
    "[SGD(matrices, lr=0.05, momentum=0.9), AdamW(rest, lr=1e-2)]": _two,
}


def _mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6).bfloat16(), _ToFloat(), nn.Linear(6, 4))


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
    "Sequential(Linear(8, 6, dtype=bfloat16), ToFloat(), Linear(6, 4))": _mixed,
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

    def smaller(self) -> Iterator[Program]:
        """Programs with something left out: a life, half of a life's actions, one action; simpler settings."""
        for i in range(1, len(self.lives)):
            yield replace(self, lives=self.lives[:i] + self.lives[i + 1 :])
        for simpler in (
            replace(self, codec="fp32"),
            replace(self, undo=False),
            replace(self, model=next(iter(MODELS))),
            replace(self, inner=next(iter(INNER))),
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
        chance.choice(list(MODELS)),
        chance.random() < 0.2,
        tuple(lives),
    )
