"""Moments of the inner optimizer that are averaged with the parameters, for a method that asks for it.

Like averaged buffers they lie behind the parameters in a fragment's flat tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftopt.codecs import Codec, check_moments_exact
from ftopt.errors import UserError
from ftopt.optimizer.inner import Inner
from ftopt.optimizer.tensors.flat import trainable

MomentSource = tuple[str, Callable[[], Tensor]]
"""A tensor's name, and where it is at the moment."""

_INSTEAD = "inner_state=keep"
_MOMENTS = {
    "SGD": ("momentum_buffer",),
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("exp_avg", "exp_avg_sq")),
    "Muon": ("momentum_buffer",),
}


def moments(model: nn.Module, inner: Inner, codec: Codec) -> Sequence[MomentSource]:
    """The moments of all parameters that train. One that is not there yet, before the first step, is read as zeros.

    Raises:
        UserError: an inner optimizer of a class whose moments are not known, or that keeps none;
        `check_moments_exact`'s.
    """
    check_moments_exact(codec)
    named = {id(p): name for name, p in trainable(model)}
    found: list[MomentSource] = []
    for optimizer in inner.optimizers:
        kind = type(optimizer).__name__
        keys = _MOMENTS.get(kind, ())
        if not keys or (kind == "SGD" and not optimizer.defaults.get("momentum")):
            raise UserError(
                f"the method averages moments, but {kind} keeps none that are known; allowed: "
                f"{', '.join(_MOMENTS)} (SGD with momentum); use {_INSTEAD}"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in named:
                    place = named[id(parameter)]
                    found += [(f"{place}/{key}", partial(_moment, optimizer, parameter, key)) for key in keys]
    return found


def _moment(optimizer: Optimizer, parameter: Tensor, key: str) -> Tensor:
    value = optimizer.state.get(parameter, {}).get(key)
    return value if isinstance(value, Tensor) else torch.zeros_like(parameter)
