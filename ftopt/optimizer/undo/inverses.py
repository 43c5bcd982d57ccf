"""The inverse of one step of SGD and of Adam for one tensor, in plain elementwise arithmetic.

=================  ==============================================================================
p, p'              the parameter before and after the step (``param``)
g                  its gradient, negated under ``maximize`` (``grad``)
d                  g + wd p, what the moments are made of (AdamW: d = g)
b, b'              SGD's ``momentum_buffer``
m, m', v, v'       Adam's ``exp_avg`` and ``exp_avg_sq``
t                  Adam's step count after the step; c1 = 1 - beta1^t, c2 = 1 - beta2^t
=================  ==============================================================================

    SGD        p = (p' + lr g) / (1 - lr wd)
    momentum   p = p' + lr b'                                b = (b' - (1 - dampening) d) / momentum
    Nesterov   p = (p' + lr (g + momentum b')) / (1 - lr wd)
    Adam       p = p' + (lr/c1) m' / (sqrt(v'/c2) + eps)     m = (m' - (1 - beta1) d) / beta1
                                                             v = (v' - (1 - beta2) d^2) / beta2
    AdamW      the same p, divided by 1 - lr wd

In the first step there was no b, and b' = d: then p = (p' + lr k g) / (1 - lr k wd), with k = 1 + momentum
under Nesterov, else 1.

A step that raised may have applied only some of its operations to a tensor. Torch applies them in a fixed order, so
their number (`Operations`) determines which.

Source: SWIFT, arXiv 2302.06173, section 4; extended by what torch.optim does (dampening, Nesterov, maximize,
first steps), and by steps that raise half-way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ftopt.step.tensors.flat import local

Values = Mapping[str, Tensor]
"""``param``, ``grad`` and the existing moments of one tensor, by name."""
Operations = Mapping[str, int]
"""The number of the step's operations that were applied to ``param`` and to each moment."""

_CHUNK = 1 << 16
"""Elements computed at once, which bounds the extra memory."""
LEAST_KEPT = 0.5
"""Weight decay that leaves a smaller share of a parameter in one step is not undone, since the inverse amplifies
rounding."""
LEAST_DECAY = 0.01
"""A momentum or beta below this is not inverted either, since the inverse divides by it."""


class Rule(ABC):
    """One parameter group's settings in a step, and the step's inverse. Before the first step moments are zero or
    missing."""

    @classmethod
    @abstractmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        """The settings of a parameter group."""

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """The names of the tensors in a parameter's state."""

    @property
    @abstractmethod
    def whole(self) -> Operations:
        """The operations of a complete step."""

    @abstractmethod
    def why_not(self) -> str | None:
        """Why steps with these settings cannot be undone; None: they can."""

    @abstractmethod
    def before(self, now: Values, done: Operations, *, t: float, first: bool) -> dict[str, Tensor]:
        """The values before the step.

        Args:
            now: the values after it, in the precision of the computation.
            done: the operations applied.
            t: the step count after it.
            first: there were no moments before, and none are returned.
        """

    @abstractmethod
    def fits(self, now: Values, before: Values, unit: float) -> bool:
        """Whether the step can lead from ``before`` to ``now``, with the dtype's unit roundoff."""


@dataclass(frozen=True, slots=True)
class SgdRule(Rule):
    """Settings of `torch.optim.SGD`; see the module's equations."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        lr, momentum, dampening, decay = (float(group[n]) for n in ("lr", "momentum", "dampening", "weight_decay"))
        return cls(lr, momentum, dampening, decay, bool(group["nesterov"]), bool(group["maximize"]))

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def whole(self) -> Operations:
        """Momentum is decayed, then added to."""
        return {"param": 1} | ({"momentum_buffer": 2} if self.momentum else {})

    def why_not(self) -> str | None:
        if 0 < abs(self.momentum) < LEAST_DECAY:
            return f"momentum={self.momentum} leaves too little of the buffer before; {LEAST_DECAY} or more, or 0"
        return too_much_decay(self.lr * self._factor, self.weight_decay)

    @property
    def _factor(self) -> float:
        return 1 + self.momentum if self.nesterov else 1.0

    def before(self, now: Values, done: Operations, *, t: float, first: bool) -> dict[str, Tensor]:
        p, g, b = now["param"], signed(now, self.maximize), now.get("momentum_buffer")
        if done["param"]:
            if first or not self.momentum:
                p = (p + self.lr * self._factor * g) / (1 - self.lr * self._factor * self.weight_decay)
            elif self.nesterov:
                p = (p + self.lr * (g + self.momentum * now["momentum_buffer"])) / (1 - self.lr * self.weight_decay)
            else:
                p = p + self.lr * now["momentum_buffer"]
        if first or not self.momentum or b is None:
            return {"param": p}
        if done["momentum_buffer"] == 2:
            b = b - (1 - self.dampening) * (g + self.weight_decay * p)
        return {"param": p, "momentum_buffer": b / self.momentum if done["momentum_buffer"] else b}

    def fits(self, now: Values, before: Values, unit: float) -> bool:
        """False only for values that are not finite."""
        return finite(now, before)

    def looks_first(self, now: Values, unit: float) -> bool:
        """Whether b' equals d up to rounding, so that there was no b, or a negligible one."""
        p = self.before(now, self.whole, t=1, first=True)["param"]
        g, decay = signed(now, self.maximize), self.weight_decay * p
        off = (now["momentum_buffer"] - (g + decay)).abs()
        return bool((off <= 8 * unit * (g.abs() + decay.abs())).all())


@dataclass(frozen=True, slots=True)
class AdamRule(Rule):
    """Settings of `torch.optim.Adam` and `torch.optim.AdamW`; see the module's equations."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    amsgrad: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self:
        lr, eps, decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        decoupled, maximize, amsgrad = (bool(group[n]) for n in ("decoupled_weight_decay", "maximize", "amsgrad"))
        beta1, beta2 = map(float, group["betas"])
        return cls(lr, beta1, beta2, eps, decay, decoupled, maximize, amsgrad)

    @property
    def moments(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    def whole(self) -> Operations:
        """AdamW decays the parameter first; the second moment is decayed, then added to."""
        return {"param": 2 if self._decays else 1, "exp_avg": 1, "exp_avg_sq": 2}

    @property
    def _decays(self) -> bool:
        return self.decoupled and self.weight_decay != 0

    def why_not(self) -> str | None:
        if self.amsgrad:
            return "amsgrad=True keeps a maximum of second moments, and what it was before is gone; amsgrad=False"
        small = too_small_betas(self.beta1, self.beta2)
        return small or (too_much_decay(self.lr, self.weight_decay) if self.decoupled else None)

    def before(self, now: Values, done: Operations, *, t: float, first: bool) -> dict[str, Tensor]:
        p, g, m, v = now["param"], signed(now, self.maximize), now.get("exp_avg"), now.get("exp_avg_sq")
        if done["param"] == self.whole["param"]:
            c1, c2 = 1 - self.beta1**t, 1 - self.beta2**t
            p = p + self.lr / c1 * now["exp_avg"] / ((now["exp_avg_sq"] / c2).sqrt() + self.eps)
        if self._decays and done["param"]:
            p = p / (1 - self.lr * self.weight_decay)
        if first or m is None or v is None:
            return {"param": p}
        d = g if self.decoupled else g + self.weight_decay * p
        if done["exp_avg"]:
            m = (m - (1 - self.beta1) * d) / self.beta1
        if done["exp_avg_sq"] == 2:
            v = v - (1 - self.beta2) * d.square()
        return {"param": p, "exp_avg": m, "exp_avg_sq": v / self.beta2 if done["exp_avg_sq"] else v}

    def fits(self, now: Values, before: Values, unit: float) -> bool:
        """False also for a second moment below 0, which shows that the gradient is not the step's."""
        if not finite(now, before):
            return False
        d = now["grad"].abs() + (0.0 if self.decoupled else self.weight_decay) * before["param"].abs()
        return not_negative(now, before, "exp_avg_sq", self.beta2, (1 - self.beta2) * d.square(), unit)


RULES: dict[type[Optimizer], type[Rule]] = {SGD: SgdRule, Adam: AdamRule, AdamW: AdamRule}
"""The optimizers whose steps are inverted. Not their subclasses, whose steps may differ."""


def chunks(tensors: Values) -> Iterator[dict[str, Tensor]]:
    """Views of the same elements of each tensor (of their local shards)."""
    own = {name: local(tensor) for name, tensor in tensors.items()}
    if all(tensor.is_contiguous() for tensor in own.values()):
        parts = [torch.split(tensor.view(-1), _CHUNK) for tensor in own.values()]
        yield from (dict(zip(own, part, strict=True)) for part in zip(*parts, strict=True))
    else:
        yield own


def wide(tensors: Values) -> dict[str, Tensor]:
    """Copies in double precision if the device has it, so that the inverse adds no rounding of its own."""
    return {name: t.to(torch.float32 if t.device.type == "mps" else torch.float64) for name, t in tensors.items()}


def not_negative(now: Values, before: Values, name: str, decay: float, added: Tensor, unit: float) -> bool:
    """Whether a second moment is at least 0; if not, the gradient is not the step's."""
    room = 16 * unit * (now[name] + added) + 1e-37
    return name not in before or bool((before[name] * decay >= -room).all())


def signed(now: Values, maximize: bool) -> Tensor:
    return -now["grad"] if maximize else now["grad"]


def too_small_betas(beta1: float, beta2: float) -> str | None:
    if min(beta1, beta2) >= LEAST_DECAY:
        return None
    return f"betas={(beta1, beta2)} leave too little of the moments before; both must be {LEAST_DECAY} or more"


def too_much_decay(lr: float, weight_decay: float) -> str | None:
    if 1 - lr * weight_decay >= LEAST_KEPT:
        return None
    return f"lr * weight_decay = {lr * weight_decay:.3g} leaves too little of the parameters; must be 0.5 or less"


def finite(now: Values, before: Values) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in (*now.values(), *before.values()))
