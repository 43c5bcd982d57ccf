"""Outer optimizers: the rule that turns the mean outer gradient into the next anchor.

Every replica computes the rule for itself and all must get the same bits, also on unlike CPUs. So the
arithmetic is *unfused*: one rounding an operation, `torch.mul` and `torch.add` apart. ``add(x, alpha=a)``,
``addcmul`` and ``lerp`` become one fused multiply-add where the CPU has it and two roundings where it has
not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class OuterOptimizerRule(Protocol):
    """A rule on flat fp32 tensors. Frozen, comparable, and without state of its own."""

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """The state at version 0: name -> flat fp32 tensor of ``anchor``'s length."""

    def step(
        self, anchor: Tensor, state: Mapping[str, Tensor], gradient: Tensor, *, version: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next anchor and state, in tensors of their own. The arguments are left as they are.

        Args:
            anchor: flat fp32.
            state: from `init` or the last step.
            gradient: the mean outer gradient, flat fp32.
            version: the outer step's number, 1 for the first.
        """


@dataclass(frozen=True, kw_only=True)
class SGD:
    r"""Stochastic gradient descent on the outer gradient, with heavy-ball or Nesterov momentum.

    With the mean outer gradient :math:`\Delta`, momentum buffer :math:`u` (0 at first), rate :math:`\eta` and
    momentum :math:`\mu`::

        u     <- mu * u + Delta
        d      = Delta + mu * u   (nesterov)   or   u
        theta <- theta - eta * d

    Equal to `torch.optim.SGD` up to rounding (torch's fuses), and bit-equal on unlike CPUs.

    Args:
        lr: the outer learning rate, > 0. 1 with ``momentum=0`` is plain averaging. Default 0.7 (DiLoCo).
        momentum: in [0, 1). Default 0: none, and no buffer is kept.
        nesterov: look ahead by one momentum step; needs ``momentum > 0``. Default False.

    Raises:
        ValueError: a setting out of range; the message says which one and what to use.

    Source: arXiv 2311.08105, section 2 (OuterOpt).
    """

    lr: float = 0.7
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.lr, int | float) and math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"outer.lr={self.lr!r}; must be a number above 0; DiLoCo uses 0.7, averaging 1.0")
        if not (isinstance(self.momentum, int | float) and 0 <= self.momentum < 1):
            raise ValueError(f"outer.momentum={self.momentum!r}; must be in [0, 1); DiLoCo uses 0.9")
        if self.nesterov and self.momentum == 0:
            raise ValueError(
                "outer.nesterov=True with outer.momentum=0 has no effect; set momentum=0.9 or nesterov=False"
            )

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """A momentum buffer of zeros, or nothing without momentum."""
        return {"momentum": torch.zeros_like(anchor)} if self.momentum else {}

    def step(
        self, anchor: Tensor, state: Mapping[str, Tensor], gradient: Tensor, *, version: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of the equations above on flat fp32 tensors; all results are in fresh memory."""
        if not self.momentum:
            return torch.sub(anchor, torch.mul(gradient, self.lr)), {}
        buffer = torch.mul(state["momentum"], self.momentum).add_(gradient)
        # The look-ahead's scratch becomes the new anchor: one buffer less at the peak.
        direction = torch.mul(buffer, self.momentum).add_(gradient) if self.nesterov else buffer.clone()
        return torch.sub(anchor, direction.mul_(self.lr), out=direction), {"momentum": buffer}


def nesterov() -> SGD:
    """DiLoCo's: rate 0.7, Nesterov momentum 0.9."""
    return SGD(lr=0.7, momentum=0.9, nesterov=True)


def check_outer(outer: object) -> None:
    """Refuses what is no rule.

    Raises:
        ValueError: says what to use.
    """
    if isinstance(outer, torch.optim.Optimizer) or not callable(getattr(outer, "step", None)):
        raise ValueError(
            f"outer={type(outer).__name__}; must be an outer optimizer of ftopt; "
            "use ftopt.SGD(lr=0.7, momentum=0.9, nesterov=True)"
        )
