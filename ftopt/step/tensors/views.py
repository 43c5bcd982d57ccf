"""The views of a model's fragments: the parameters, buffers and moments of each.

For a method that requires it, moments of the inner optimizer are averaged with the parameters. Like averaged buffers
they follow the parameters in a fragment's flat tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftopt.common.plural import count
from ftopt.errors import UserError
from ftopt.methods import Method
from ftopt.step.inner import Inner
from ftopt.step.tensors.buffers import averaged, shared_out
from ftopt.step.tensors.flat import FlatView, parameters, trainable

_MOMENTS = {
    "SGD": ("momentum_buffer",),
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("exp_avg", "exp_avg_sq")),
    "Muon": ("momentum_buffer",),
}


def views_of(model: nn.Module, method: Method, inner: Inner) -> list[FlatView]:
    """One view per fragment, in the method's order. UserError: the method cannot partition this model, or buffers or
    moments cannot be averaged."""
    fragments = partition_of(model, method)
    kept = averaged(model) if method.buffers == "mean" else []
    buffers = shared_out(kept, fragments)
    more = _moments(model, inner) if method.inner_state == "average" else []
    return [FlatView(model, names, buffers=own, more=more) for names, own in zip(fragments, buffers, strict=True)]


def partition_of(model: nn.Module, method: Method) -> list[list[str]]:
    """The names of each fragment's parameters. UserError: the method cannot partition this model."""
    try:
        fragments = method.partition(parameters(model))
    except ValueError as error:
        raise UserError(f"method {method.name}: {error}") from None
    if fragments or method.gradients is None:  # a method that only exchanges gradients has none
        _check_partition(method, fragments, [parameter.name for parameter in parameters(model)])
    return fragments


def _moments(model: nn.Module, inner: Inner) -> list[tuple[str, Callable[[], Tensor]]]:
    """The moments of all parameters that train. A missing one, before the first step, is read as zeros.

    Raises:
        UserError: an inner optimizer's class has unknown moments or none.
    """
    named = {id(p): name for name, p in trainable(model)}
    found: list[tuple[str, Callable[[], Tensor]]] = []
    for optimizer in inner.optimizers:
        kind = type(optimizer).__name__
        keys = _MOMENTS.get(kind, ())
        if not keys or (kind == "SGD" and not optimizer.defaults.get("momentum")):
            raise UserError(
                f"the method averages moments, but {kind} keeps none that are known; allowed: "
                f"{', '.join(_MOMENTS)} (SGD with momentum); use inner_state=keep"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in named:
                    place = named[id(parameter)]
                    found += [(f"{place}/{key}", partial(_moment, optimizer, parameter, key)) for key in keys]
    return sorted(found, key=lambda item: item[0])


def _moment(optimizer: Optimizer, parameter: Tensor, key: str) -> Tensor:
    value = optimizer.state.get(parameter, {}).get(key)
    return value if isinstance(value, Tensor) else torch.zeros_like(parameter)


def _check_partition(method: Method, fragments: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    """Checks that each parameter is in one fragment and no fragment is empty, which a user's method may violate."""
    dealt = Counter(name for fragment in fragments for name in fragment)
    wrong = [name for name in {**dict.fromkeys(names), **dealt} if dealt[name] != 1 or name not in names]
    if wrong or not all(fragments) or not fragments:
        got = f"{wrong[0]!r} to {count(dealt[wrong[0]], 'fragment')}" if wrong else f"{fragments!r:.80}"
        raise UserError(
            f"method {method.name}: partition() gives {got}; must give each trained parameter to one fragment, and "
            "each fragment a parameter"
        )
