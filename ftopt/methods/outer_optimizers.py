"""Outer optimizers: the rule that turns the mean outer gradient into the next anchor.

Every replica computes the rule for itself, and all must get the same bits, also on different CPUs. So the arithmetic is
*unfused*: one rounding per operation, `torch.mul` and `torch.add` separately. ``add(x, alpha=a)``, ``addcmul`` and
``lerp`` use a fused multiply-add on CPUs that have it, and round twice on others. The rules multiply by scalars and
never divide by them (a GPU multiplies by the reciprocal), compute powers as products, and do not use MKL's square roots
(`_sqrt_`).

Schedules of rate and momentum follow the outer optimizer's own step count, which is part of its state: each fragment
has its own, newcomers fetch it, and it excludes rounds that only average, before ``average_until_step``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy

from ftopt.common.later import torch
from ftopt.errors import Settings, UserError, check_bool, check_number, check_whole
from ftopt.methods.values import Execution

if TYPE_CHECKING:
    from torch import Tensor


class Schedule(Protocol):
    """A factor on the rate or the momentum, by outer step. A frozen dataclass."""

    @property
    def moves(self) -> bool:
        """Whether the factor ever differs from 1."""

    def factor(self, t: int) -> float:
        """The factor at outer step ``t``, 1 for the first. The same bits on all machines."""


@dataclass(frozen=True, kw_only=True)
class ConstantRate(Settings):
    """The rate itself, after a warm-up: ``min(1, t / warmup)``.

    Args:
        warmup: outer steps, >= 0. Default 0: none.
    """

    warmup: int = 0

    def __post_init__(self) -> None:
        check_whole("schedule.warmup", self.warmup, 0, of="outer steps")

    @property
    def moves(self) -> bool:
        return self.warmup > 0

    def factor(self, t: int) -> float:
        return _warm(t, self.warmup)


@dataclass(frozen=True, kw_only=True)
class LinearRate(Settings):
    """A warm-up as in `ConstantRate`, then a line from 1 down to ``floor`` at step ``steps``, where it stays.

    Args:
        steps: outer steps of the whole run (of one fragment), above ``warmup``.
        warmup: outer steps, >= 0. Default 0.
        floor: from 0 to 1. Default 0.1.
    """

    steps: int
    warmup: int = 0
    floor: float = 0.1
    moves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("schedule.warmup", self.warmup, 0, of="outer steps")
        check_whole("schedule.steps", self.steps, self.warmup + 1, of="outer steps")
        check_number("schedule.floor", self.floor, "[0, 1]", hint="a share of the rate")

    def factor(self, t: int) -> float:
        if t <= self.warmup:
            return _warm(t, self.warmup)
        done = min(1.0, (t - self.warmup) / (self.steps - self.warmup))
        # Rounded because the last bits of a cosine differ between C libraries.
        return round(self.floor + (1 - self.floor) * self._left(done), 9)

    def _left(self, done: float) -> float:
        return 1 - done


@dataclass(frozen=True, kw_only=True)
class CosineRate(LinearRate):
    """As `LinearRate`, along half a cosine."""

    def _left(self, done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2


def _warm(t: int, warmup: int) -> float:
    return 1.0 if t >= warmup else t / warmup


class OuterOptimizer(Protocol):
    """A rule on flat fp32 tensors. Frozen, comparable and stateless."""

    @property
    def execution(self) -> Execution:
        """How `step` may be computed: ``elementwise`` costs one sweep through memory instead of one per operation."""

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """The state at version 0: name -> flat fp32 tensor of ``anchor``'s length, or fp32 scalar."""

    def step(self, anchor: Tensor, state: Mapping[str, Tensor], gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The next anchor and state, in tensors of their own; ``anchor`` and ``state`` do not change.

        Args:
            anchor: flat fp32.
            state: from `init` or the last step.
            gradient: the mean outer gradient, flat fp32. May be overwritten and returned as the anchor.
        """


def count(state: Mapping[str, Tensor], name: str = "step") -> int:
    """The number of the next step, 1 for the first, from the count of steps taken in ``state``."""
    return int(state[name]) + 1


def counted(t: int, like: Tensor) -> Tensor:
    """``t`` as a scalar of the outer state (fp32: exact up to 16,777,216)."""
    return torch.tensor(float(t), dtype=torch.float32, device=like.device)


@dataclass(frozen=True, kw_only=True)
class SGD(Settings):
    r"""Stochastic gradient descent on the outer gradient, with heavy-ball or Nesterov momentum.

    With the mean outer gradient :math:`\Delta`, momentum buffer :math:`u` (0 at first), rate :math:`\eta` and
    momentum :math:`\mu`:

        u     <- mu * u + Delta
        d      = Delta + mu * u   (nesterov)   or   u
        theta <- theta - eta * d

    Equal to `torch.optim.SGD` up to rounding (torch's fuses), and bit-equal on different CPUs.

    Args:
        lr: the outer learning rate, > 0. Default 1, with ``momentum=0`` plain averaging.
        momentum: in [0, 1). Default 0: none, and no buffer is kept.
        nesterov: look ahead by one momentum step; needs ``momentum > 0``. Default False.
        schedule: of the rate, over outer steps: `ConstantRate` (default, no warm-up), `LinearRate` or `CosineRate`.
        momentum_schedule: the same of the momentum. Default: `ConstantRate`.

    Raises:
        UserError: a setting out of range; the message says which one and what to use.

    Source: arXiv 2311.08105, section 2 (OuterOpt).
    """

    execution: ClassVar[Execution] = Execution(elementwise=True)

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    schedule: Schedule = field(default_factory=ConstantRate)
    momentum_schedule: Schedule = field(default_factory=ConstantRate)

    def __post_init__(self) -> None:
        check_number("outer.lr", self.lr, "(0, inf)", hint="DiLoCo uses 0.7, averaging 1.0")
        check_number("outer.momentum", self.momentum, "[0, 1)", hint="DiLoCo uses 0.9")
        check_bool("outer.nesterov", self.nesterov)
        check_schedule(self.schedule)
        check_schedule(self.momentum_schedule, "momentum_schedule")
        if self.nesterov and self.momentum == 0:
            raise UserError("outer.nesterov=True with momentum=0 has no effect; set momentum=0.9 or nesterov=False")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """A momentum buffer of zeros if there is momentum, and a step count if rate or momentum change."""
        state = {"momentum": torch.zeros_like(anchor)} if self.momentum else {}
        return state | ({"step": counted(0, anchor)} if self.moves else {})

    def step(self, anchor: Tensor, state: Mapping[str, Tensor], gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of the equations above on flat fp32 tensors; the new anchor is in the memory of ``gradient``."""
        lr, momentum, new = self.factors(state)
        direction = gradient
        if self.momentum:
            buffer = new["momentum"] = torch.mul(state["momentum"], momentum).add_(gradient)
            direction = gradient.add_(torch.mul(buffer, momentum)) if self.nesterov else gradient.copy_(buffer)
        return torch.sub(anchor, direction.mul_(lr), out=direction), new

    @property
    def moves(self) -> bool:
        """Whether rate or momentum ever change."""
        return self.schedule.moves or self.momentum_schedule.moves

    def factors(self, state: Mapping[str, Tensor]) -> tuple[float, float, dict[str, Tensor]]:
        """The next step's rate and momentum, and the scalars of the next state."""
        if not self.moves:
            return self.lr, self.momentum, {}
        t = count(state)
        rates = self.lr * self.schedule.factor(t), self.momentum * self.momentum_schedule.factor(t)
        return *rates, {"step": counted(t, state["step"])}


@dataclass(frozen=True, kw_only=True)
class Adam(Settings):
    r"""Adam on the outer gradient.

    With the mean outer gradient :math:`\Delta`, moments :math:`m, v` (0 at first), rate :math:`\eta`, and ``t`` the
    number of the step, 1 for the first:

        m     <- beta1 * m + (1 - beta1) * Delta
        v     <- beta2 * v + (1 - beta2) * Delta^2
        theta <- theta - eta / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Equal to `torch.optim.Adam` up to rounding (torch's fuses), and bit-equal on different CPUs.

    Args:
        lr: the outer learning rate, > 0. Default 0.3.
        betas: in [0, 1). Default 0.9 and 0.95.
        eps: > 0. Default 0.1, which DiLoCo's paper needed for stability of the outer optimizer.
        schedule: of the rate, over outer steps: `ConstantRate` (default, no warm-up), `LinearRate` or `CosineRate`.

    Raises:
        UserError: a setting out of range; the message says which one and what to use.

    Source: arXiv 1412.6980, algorithm 1; as outer optimizer arXiv 2311.08105, section 3. Rate and
        betas are ours.
    """

    execution: ClassVar[Execution] = Execution(elementwise=True)

    lr: float = 0.3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 0.1
    schedule: Schedule = field(default_factory=ConstantRate)

    def __post_init__(self) -> None:
        check_number("outer.lr", self.lr, "(0, inf)", hint="0.3 goes with eps=0.1")
        betas = self.betas if isinstance(self.betas, list | tuple) else []
        if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            raise UserError(f"outer.betas={self.betas!r}; must be two numbers in [0, 1); use [0.9, 0.95]")
        check_schedule(self.schedule)
        check_number("outer.eps", self.eps, "(0, inf)", hint="DiLoCo's paper needed 0.1")
        object.__setattr__(self, "betas", [float(beta) for beta in self.betas])

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(anchor), "v": torch.zeros_like(anchor), "step": counted(0, anchor)}

    def step(self, anchor: Tensor, state: Mapping[str, Tensor], gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of the equations above on flat fp32 tensors; all results are in fresh memory."""
        (beta1, rest1, beta2, rest2, rate, unbiased, eps), scalars = self.factors(state)
        m = torch.mul(state["m"], beta1).add_(torch.mul(gradient, rest1))
        v = torch.mul(state["v"], beta2).add_(torch.mul(gradient, gradient).mul_(rest2))
        direction = torch.mul(m, rate)
        direction.div_(_sqrt_(torch.mul(v, unbiased)).add_(eps))
        return torch.sub(anchor, direction, out=direction), {"m": m, "v": v, **scalars}

    def factors(self, state: Mapping[str, Tensor]) -> tuple[tuple[float, ...], dict[str, Tensor]]:
        """The next step's factors: ``beta1``, ``1 - beta1``, ``beta2``, ``1 - beta2``, the rate of the biased ``m``,
        the factor that makes ``v`` unbiased, and ``eps``; and the scalars of the next state."""
        t, (beta1, beta2) = count(state), self.betas
        rate = self.lr * self.schedule.factor(t) / (1 - _power(beta1, t))
        unbiased = 1 / (1 - _power(beta2, t))
        return (beta1, 1 - beta1, beta2, 1 - beta2, rate, unbiased, self.eps), {"step": counted(t, state["step"])}


def _sqrt_(x: Tensor) -> Tensor:
    """The square root of an fp32 tensor, in place, correctly rounded. On a CPU torch uses MKL's, whose last bit depends
    on the processor; numpy uses the processor's own instruction, as torch does on a GPU."""
    if x.device.type != "cpu":
        return x.sqrt_()
    array = x.numpy()
    with numpy.errstate(invalid="ignore"):  # values that are not finite are detected elsewhere
        numpy.sqrt(array, out=array)
    return x


def _power(x: float, n: int) -> float:
    """``x ** n`` by multiplications alone: the C libraries' ``pow`` differ in the last bit."""
    result = 1.0
    while n:
        if n & 1:
            result *= x
        x, n = x * x, n >> 1
    return result


def check_schedule(schedule: object, name: str = "schedule") -> None:
    """Raises UserError unless ``schedule`` is a `Schedule`."""
    if isinstance(schedule, type) or not callable(getattr(schedule, "factor", None)):
        raise UserError(f"outer.{name}={schedule!r}; must be a schedule; use ftopt.outer.CosineRate(steps=100)")
