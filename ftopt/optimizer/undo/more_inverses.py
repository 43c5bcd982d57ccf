"""One step of RMSprop, Adagrad, NAdam and RAdam for one tensor, backwards. Letters and interface as in ``inverses.py``.

=================  ==============================================================================
d                  g + wd p (decoupled weight decay: d = g)
s, s'              RMSprop's ``square_avg``, Adagrad's ``sum``
b, b'              RMSprop's ``momentum_buffer``
c                  Adagrad: lr / (1 + (t - 1) lr_decay)
mu_t               NAdam: beta1 (1 - 0.96^(t momentum_decay) / 2); M' their product, ``mu_product``
r                  RAdam: the rectification while rho_t > 5, sqrt(c2) / (sqrt(v') + eps) included; else 1
=================  ==============================================================================

::

    RMSprop    p = p' + lr d / (sqrt(s') + eps)               s = (s' - (1 - alpha) d^2) / alpha
    momentum   p = p' + lr b'                                 b = (b' - d / (sqrt(s') + eps)) / momentum
    Adagrad    p = p' + c d / (sqrt(s') + eps)                s = s' - d^2
    NAdam      p = p' + (k1 d + k2 m') / (sqrt(v'/c2) + eps)  m, v as Adam's; M = M' / mu_t
               k1 = lr (1 - mu_t) / (1 - M')                  k2 = lr mu_{t+1} / (1 - M' mu_{t+1})
    RAdam      p = p' + (lr/c1) r m'                          m, v as Adam's

Where d holds wd p, an equation p = p' + k (g + wd p) is solved for p: p = (p' + k g) / (1 - k wd). A step in which any
element's 1 - k wd is below one half is not undone: its inverse is NaN there.

Adamax keeps a running maximum, and what it was before is gone; RMSprop's ``centered`` divides by the root of a small
difference of large numbers, which rounding would decide. Neither is here.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from ftopt.optimizer.undo.inverses import (
    LEAST_DECAY,
    LEAST_KEPT,
    AdamRule,
    Operations,
    Rule,
    SgdRule,
    Values,
    finite,
    not_negative,
    signed,
    too_much_decay,
    too_small_betas,
)


@dataclass(frozen=True, slots=True)
class RMSpropRule(Rule):
    """Settings of `torch.optim.RMSprop`."""

    lr: float
    alpha: float
    eps: float
    weight_decay: float
    momentum: float
    centered: bool
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        lr, alpha, eps, decay, momentum = (float(group[n]) for n in ("lr", "alpha", "eps", "weight_decay", "momentum"))
        return cls(lr, alpha, eps, decay, momentum, bool(group["centered"]), bool(group["maximize"]))

    @property
    def moments(self) -> tuple[str, ...]:
        return ("square_avg", "momentum_buffer") if self.momentum else ("square_avg",)

    @property
    def whole(self) -> Operations:
        return {"param": 1} | dict.fromkeys(self.moments, 2)

    def why_not(self) -> str | None:
        if self.centered:
            return "centered=True divides by a difference that rounding decides; centered=False"
        if self.alpha < LEAST_DECAY or 0 < self.momentum < LEAST_DECAY:
            got = f"alpha={self.alpha} and momentum={self.momentum}"
            return f"{got} leave too little of what was before; {LEAST_DECAY} or more, or momentum=0"
        return None

    def before(self, now: Values, done: Operations, *, t: float, first: bool) -> dict[str, Tensor]:
        g, s = signed(now, self.maximize), now["square_avg"]
        over = s.sqrt() + self.eps
        if self.momentum:
            p = now["param"] + self.lr * now["momentum_buffer"]
        else:
            p = _solved(now["param"], self.lr / over, g, self.weight_decay)
        if first:
            return {"param": p}
        d = g + self.weight_decay * p
        found = {"param": p, "square_avg": (s - (1 - self.alpha) * d.square()) / self.alpha}
        if self.momentum:
            found["momentum_buffer"] = (now["momentum_buffer"] - d / over) / self.momentum
        return found

    def fits(self, now: Values, before: Values, unit: float) -> bool:
        d = now["grad"].abs() + self.weight_decay * before["param"].abs()
        added = (1 - self.alpha) * d.square()
        return finite(now, before) and not_negative(now, before, "square_avg", self.alpha, added, unit)


@dataclass(frozen=True, slots=True)
class AdagradRule(Rule):
    """Settings of `torch.optim.Adagrad`, whose state is there before its first step, with any value."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool

    starts_at_zero: ClassVar[bool] = False

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        lr, lr_decay, eps, decay = (float(group[name]) for name in ("lr", "lr_decay", "eps", "weight_decay"))
        return cls(lr, lr_decay, eps, decay, bool(group["maximize"]))

    @property
    def moments(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    def whole(self) -> Operations:
        return {"param": 1, "sum": 1}

    def why_not(self) -> str | None:
        return None

    def before(self, now: Values, done: Operations, *, t: float, first: bool) -> dict[str, Tensor]:
        g, rate = signed(now, self.maximize), self.lr / (1 + (t - 1) * self.lr_decay)
        p = _solved(now["param"], rate / (now["sum"].sqrt() + self.eps), g, self.weight_decay)
        return {"param": p, "sum": now["sum"] - (g + self.weight_decay * p).square()}

    def fits(self, now: Values, before: Values, unit: float) -> bool:
        d = now["grad"].abs() + self.weight_decay * before["param"].abs()
        return finite(now, before) and not_negative(now, before, "sum", 1.0, d.square(), unit)


@dataclass(frozen=True, slots=True)
class _AdamLike(Rule):
    """What `torch.optim.NAdam` and `torch.optim.RAdam` have in common with Adam."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool

    @property
    def moments(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    def whole(self) -> Operations:
        return {"param": 1, "exp_avg": 1, "exp_avg_sq": 2}

    def why_not(self) -> str | None:
        small = too_small_betas(self.beta1, self.beta2)
        return small or (too_much_decay(self.lr, self.weight_decay) if self.decoupled else None)

    @property
    def _coupled(self) -> float:
        """The weight decay in d."""
        return 0.0 if self.decoupled else self.weight_decay

    def before(self, now: Values, done: Operations, *, t: float, first: bool) -> dict[str, Tensor]:
        g = signed(now, self.maximize)
        k, rest = self._moved(now, t)
        p = _solved(now["param"] + rest, k, g, self._coupled)
        if self.decoupled:
            p = p / (1 - self.lr * self.weight_decay)
        if first:
            return {"param": p}
        d = g + self._coupled * p
        m = (now["exp_avg"] - (1 - self.beta1) * d) / self.beta1
        v = (now["exp_avg_sq"] - (1 - self.beta2) * d.square()) / self.beta2
        return {"param": p, "exp_avg": m, "exp_avg_sq": v}

    def fits(self, now: Values, before: Values, unit: float) -> bool:
        d = now["grad"].abs() + self._coupled * before["param"].abs()
        added = (1 - self.beta2) * d.square()
        return finite(now, before) and not_negative(now, before, "exp_avg_sq", self.beta2, added, unit)

    @abstractmethod
    def _moved(self, now: Values, t: float) -> tuple[Tensor, Tensor]:
        """By how much the step moved the parameter, weight decay left out: k and r of ``-(k d + r)``."""


@dataclass(frozen=True, slots=True)
class NAdamRule(_AdamLike):
    """Settings of `torch.optim.NAdam`, and a parameter's ``mu_product`` after the step."""

    momentum_decay: float
    mu_product: float = math.nan

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        return cls(*_settings(group), float(group["momentum_decay"]))

    def for_state(self, state: Mapping[str, Any]) -> Self:
        return replace(self, mu_product=float(state.get("mu_product", math.nan)))

    def _mu(self, t: float) -> float:
        return self.beta1 * (1 - 0.5 * math.pow(0.96, t * self.momentum_decay))

    def _moved(self, now: Values, t: float) -> tuple[Tensor, Tensor]:
        over = (now["exp_avg_sq"] / (1 - self.beta2**t)).sqrt() + self.eps
        following = self._mu(t + 1)
        k1 = self.lr * (1 - self._mu(t)) / (1 - self.mu_product)
        k2 = self.lr * following / (1 - self.mu_product * following)
        return k1 / over, k2 * now["exp_avg"] / over

    def uncount(self, state: dict[str, Any], t: float) -> None:
        state["mu_product"] /= self._mu(t)
        state["step"] -= 1


@dataclass(frozen=True, slots=True)
class RAdamRule(_AdamLike):
    """Settings of `torch.optim.RAdam`."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        return cls(*_settings(group))

    def _moved(self, now: Values, t: float) -> tuple[Tensor, Tensor]:
        c1, c2 = 1 - self.beta1**t, 1 - self.beta2**t
        longest = 2 / (1 - self.beta2) - 1
        length = longest - 2 * t * self.beta2**t / c2
        rest = self.lr / c1 * now["exp_avg"]
        if length > 5:
            square = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            rest = rest * math.sqrt(square * c2) / (now["exp_avg_sq"].sqrt() + self.eps)
        return torch.zeros_like(rest), rest


RULES: dict[type[Optimizer], type[Rule]] = {
    SGD: SgdRule,
    Adam: AdamRule,
    AdamW: AdamRule,
    RMSprop: RMSpropRule,
    Adagrad: AdagradRule,
    NAdam: NAdamRule,
    RAdam: RAdamRule,
}
"""The optimizers whose steps can be undone. Not their subclasses, whose steps may be others."""


def _settings(group: Mapping[str, Any]) -> tuple[float, float, float, float, float, bool, bool]:
    beta1, beta2 = map(float, group["betas"])
    lr, eps, decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
    return lr, beta1, beta2, eps, decay, bool(group["decoupled_weight_decay"]), bool(group["maximize"])


def _solved(after: Tensor, k: Tensor, g: Tensor, weight_decay: float) -> Tensor:
    """p of ``after = p - k (g + wd p)``; NaN where weight decay leaves too little of it."""
    kept = 1 - k * weight_decay
    return (after + k * g) / (torch.where(kept >= LEAST_KEPT, kept, math.nan) if weight_decay else 1.0)
