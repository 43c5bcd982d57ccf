"""What happens in one run: the settings of a method, who takes a step when, who comes and goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Rate = Callable[[int], float]


@dataclass(frozen=True)
class Outer:
    """An outer optimizer, and its rate over its own steps."""

    kind: str = "sgd"
    lr: float = 0.7
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 0.1
    warmup: int = 0
    cosine: int | None = None
    floor: float = 0.1

    def rate(self, step: int) -> float:
        """Of its step 1, 2, ...: a linear warm-up, then half a cosine from 1 to ``floor``."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        if self.cosine is None:
            return self.lr
        done = min(1.0, (step - self.warmup) / (self.cosine - self.warmup))
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


def _layer(*numbers: int) -> tuple[str, ...]:
    return tuple(f"layers.{n}.{what}" for n in numbers for what in ("weight", "bias"))


_TABLE, _HEAD = ("table.weight",), ("head.weight", "head.bias")

CUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "named": (_TABLE, _layer(0, 1, 2), _HEAD),
    "strided": (_TABLE + _layer(1) + _HEAD, _layer(0, 2)),
    "balanced": (
        ("table.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "head.bias"),
        ("layers.0.weight", "layers.2.weight", "layers.2.bias", "head.weight"),
    ),
}
"""Fragments of `problems.Mlp`, by hand. Balanced: 56 + 30 + 8 + 7 + 3 and 48 + 35 + 15 + 5 elements."""


@dataclass(frozen=True)
class Spec:
    """A method's settings, under the papers' names."""

    kind: str
    """local_sgd, diloco, streaming, decoupled, slowmo, sync_sgd, paft."""
    every: int
    """H."""
    outer: Outer = field(default_factory=Outer)
    cut: str = ""
    """Into fragments, a key of `CUTS`. Empty: one of all parameters."""
    delay: int = 0
    mix: float | None = None
    weights: str = "steps"
    average_until: int = 0
    slow_lr: float = 1.0
    slow_momentum: float = 0.6
    inner_state: str = "keep"
    clip: float | None = None

    @property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each; empty: one of all."""
        return CUTS[self.cut] if self.cut else ()


@dataclass(frozen=True)
class Change:
    """Before the step of ``tick``: a replica comes (``join``), goes (``leave``), is killed (``die``), ``freeze`` and
    ``thaw`` parameters whose names begin with ``what`` (``replica`` None: in all)."""

    tick: int
    kind: str
    replica: int | None = None
    what: str = ""


@dataclass(frozen=True)
class Scenario:
    """One run. Ticks are 1, 2, ...; in each, every replica that is there takes one inner step, in lockstep."""

    spec: Spec
    inner: str = "sgd"
    problem: str = "linear"
    replicas: int = 2
    """From the start on; those that join have the next numbers."""
    ticks: int = 24
    rate: Rate | None = None
    """Learning rate at a tick. None: the inner optimizer's own."""
    clip: float | None = None
    """Each replica clips its own gradients to this norm."""
    changes: tuple[Change, ...] = ()
    skips: frozenset[tuple[int, int]] = frozenset()
    """(tick, replica): takes no step then."""
    noisy: bool = False
    """Each replica's copy of the agreed gradient is corrupted."""
    bf16: bool = False
    """Parameters, and the inner optimizers' arithmetic."""

    def at(self, tick: int, *kinds: str) -> list[Change]:
        """The changes before this tick, in order."""
        return [change for change in self.changes if change.tick == tick and change.kind in kinds]

    def everybody(self) -> int:
        """How many replicas there ever are."""
        return self.replicas + sum(change.kind == "join" for change in self.changes)
