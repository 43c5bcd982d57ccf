"""The views of a model's fragments: which parameters, buffers and moments each holds."""

from __future__ import annotations

from torch import nn

from ftopt.codecs import Codec
from ftopt.errors import UserError
from ftopt.methods import Method
from ftopt.optimizer.inner import Inner
from ftopt.optimizer.tensors.buffers import averaged, shared_out
from ftopt.optimizer.tensors.flat import FlatView, parameters
from ftopt.optimizer.tensors.moments import moments


def views_of(model: nn.Module, method: Method, inner: Inner, codec: Codec) -> list[FlatView]:
    """One view a fragment, in the method's order.

    Raises:
        UserError: the method cannot partition this model, or buffers or moments cannot be averaged.
    """
    try:
        fragments = method.partition(parameters(model))
    except ValueError as error:
        raise UserError(f"method {method.name}: {error}") from None
    kept = averaged(model) if method.buffers == "mean" else []
    buffers = shared_out(kept, fragments)
    more = moments(model, inner, codec) if method.inner_state == "average" else []
    return [FlatView(model, names, buffers=own, more=more) for names, own in zip(fragments, buffers, strict=True)]
