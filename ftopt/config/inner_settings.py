"""The section ``inner`` of a recipe: a dataclass per inner optimizer, and the schedules of its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ftopt.config.checks import above_zero, at_least
from ftopt.errors import UserError, check_choice


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """Linear warm-up over ``warmup`` inner steps, then a cosine down to ``floor`` times the rate."""

    warmup: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        at_least("inner.schedule", 0, warmup=self.warmup, floor=self.floor)


@dataclass(frozen=True, kw_only=True)
class ConstantConfig:
    """Linear warm-up over ``warmup`` inner steps, then the rate itself."""

    warmup: int = 0

    def __post_init__(self) -> None:
        at_least("inner.schedule", 0, warmup=self.warmup)


ScheduleConfig = CosineConfig | ConstantConfig


@dataclass(frozen=True, kw_only=True)
class InnerOptimizerConfig:
    """The settings of every inner optimizer.

    Args:
        lr: the learning rate, > 0.
        params: the parameters to train, among those not claimed by earlier sections: ``rest`` (default, all of them),
            ``matrices`` (two dimensions, no embedding), or a module's name or a pattern of parameters' names, e.g.
            ``head`` or ``blocks.*.weight``.
        decay: parameters with weight decay: ``all`` (default), or ``weights``, which leaves out norms and biases
            (parameters of one dimension).
        schedule: of the learning rate.
    """

    lr: float = 1e-3
    params: str = "rest"
    decay: str = "all"
    schedule: ScheduleConfig = field(default_factory=ConstantConfig)

    def __post_init__(self) -> None:
        above_zero("inner", lr=self.lr)
        if not self.params:
            raise UserError("inner.params is empty; use rest, matrices, or a name pattern such as blocks.*.weight")
        check_choice("inner.decay", self.decay, ("all", "weights"), "weights leaves out norms and biases")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(InnerOptimizerConfig):
    """``torch.optim.AdamW`` (``inner.name: adamw``)."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("inner", 0, eps=self.eps, weight_decay=self.weight_decay)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"inner.betas={list(self.betas)}; must be two numbers, each at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class AdamConfig(AdamWConfig):
    """``torch.optim.Adam`` (``inner.name: adam``): as AdamW, with the weight decay in the gradient."""


@dataclass(frozen=True, kw_only=True)
class SgdConfig(InnerOptimizerConfig):
    """``torch.optim.SGD`` (``inner.name: sgd``)."""

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("inner", 0, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and not self.momentum:
            raise UserError("inner.nesterov=true with momentum=0; Nesterov needs a momentum; set inner.momentum=0.9")


@dataclass(frozen=True, kw_only=True)
class MuonConfig(InnerOptimizerConfig):
    """``torch.optim.Muon`` (``inner.name: muon``, torch 2.9 or newer), for matrices only; another section for the rest.

    Args:
        momentum, nesterov: as in torch, with torch's defaults.
        adjust_lr: how the rate depends on a matrix' shape: ``original`` (default) or ``match_rms_adamw``, which makes
            updates as large as AdamW's, so that its rates can be used.
        others: see `InnerOptimizerConfig`; ``params`` is ``matrices`` here. Embeddings and the head usually belong to
            AdamW: put a section ``params: head`` before this one.
    """

    params: str = "matrices"
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr: str = "original"
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("inner", 0, momentum=self.momentum, weight_decay=self.weight_decay)
        check_choice("inner.adjust_lr", self.adjust_lr, ("original", "match_rms_adamw"))


@dataclass(frozen=True, kw_only=True)
class TorchConfig(InnerOptimizerConfig):
    """Any other optimizer (``inner.name: torch``), e.g. ``torchao.optim.AdamW8bit``.

    Args:
        cls: path of the class, ``package.module.Class``.
        args: its keyword arguments besides ``lr``.
        others: see `InnerOptimizerConfig`.
    """

    cls: str = "torch.optim.RMSprop"
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.cls.rpartition(".")):
            raise UserError(f"inner.cls={self.cls!r}; must be package.module.Class, e.g. torch.optim.RMSprop")
        if "lr" in self.args:
            raise UserError(f"inner.args has lr={self.args['lr']!r}; give it as inner.lr, which the schedule moves")


InnerConfig = AdamWConfig | SgdConfig | MuonConfig | TorchConfig


def factor(schedule: ScheduleConfig, inner_step: int, inner_steps: int) -> float:
    """The factor of the learning rate for the step after ``inner_step`` of ``inner_steps``."""
    warm = min(1.0, (inner_step + 1) / schedule.warmup) if schedule.warmup else 1.0
    if not isinstance(schedule, CosineConfig):
        return warm
    progress = (inner_step - schedule.warmup) / max(1, inner_steps - schedule.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    return warm * (schedule.floor + (1 - schedule.floor) * cosine)
