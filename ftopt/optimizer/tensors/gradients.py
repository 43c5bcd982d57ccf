"""Gradients as a fragment: what a method exchanges that averages them instead of parameters.

To the outer step a `GradientView` is a view like that of parameters: its values are *minus the sum of the gradients
that no round has counted yet*, its anchor is 0. So freezing, counting once and carrying over what came too late are
the same code for both. Taking up a committed state means one step of the inner optimizers with the agreed gradient
(`Live`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ftopt.optimizer.inner import Inner, device_of
from ftopt.optimizer.tensors.digest import digest
from ftopt.optimizer.tensors.flat import FlatView, trainable
from ftopt.streams import used_here

_LOCK_S = 1.0
_PARAMS, _GRADIENT, _INNER, _NUMBER = "params", "gradient", "inner.", "number."


class GradientView(FlatView):
    """Minus the sum of the gradients of the parameters that train, flat fp32.

    Args:
        model: whose gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._sum = torch.zeros(self.numel, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def add(self, times: float = 1.0) -> None:
        """Takes the gradients at hand into the sum, ``times`` as they are."""
        for parameter, place in zip(self._parameters, self._views(self._sum), strict=True):
            if parameter.grad is not None:
                place.sub_(local(parameter.grad), alpha=times)

    @torch.no_grad()
    def give(self, gradient: Tensor) -> None:
        """Puts ``gradient`` (flat fp32) where the inner optimizers look; who got none anywhere keeps None."""
        for parameter, part in zip(self._parameters, self._views(gradient.to(self.device)), strict=True):
            if parameter.grad is not None:
                local(parameter.grad).copy_(part)
            elif bool(part.any()):
                parameter.grad = part.to(parameter.dtype, copy=True)

    def read(self, out: Tensor) -> Tensor:
        """Copies the sum."""
        return out.copy_(self._sum)

    def parts(self, size: int) -> Iterator[tuple[Tensor, slice]]:
        """Of the sum."""
        for part in torch.split(self._sum, size):
            start = part.storage_offset()
            yield part, slice(start, start + part.numel())

    def write(self, flat: Tensor) -> None:
        """Sets the sum."""
        self._sum.copy_(flat)

    def cast(self, flat: Tensor) -> Tensor:
        """Sums are fp32 whatever the parameters are."""
        return flat

    def clones(self) -> list[Tensor]:
        """A copy of the sum."""
        return [self._sum.clone()]

    def restore(self, clones: Sequence[Tensor]) -> None:
        """Puts it back."""
        self._sum.copy_(clones[0])


@dataclass(frozen=True, slots=True)
class Fetched:
    """A peer's model, inner state and, unless it had been applied there, the last agreed gradient.

    ``tensors``: all of it as it came, to be served on until the training thread has applied it.
    """

    params: Tensor
    inner: Mapping[str, Tensor]
    gradient: Tensor | None
    tensors: Mapping[str, Tensor]


class Live:
    """The model and the inner optimizers' state as part of the committed state: all replicas step alike.

    They change under the training thread's hands, so that whoever serves them to a peer makes a copy, between two
    steps. ``lock`` is held while a step is applied.

    Args:
        model: the model.
        inner: the inner optimizers.
    """

    def __init__(self, model: nn.Module, inner: Inner) -> None:
        self.lock = threading.Lock()
        self._view = FlatView(model)
        self._inner = inner
        names = {id(p): name for name, p in trainable(model)}
        self._owners = [
            (names[id(p)], p, group, optimizer)
            for optimizer in inner.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in names
        ]

    def digest(self) -> str:
        """Of the model and the inner state as they are."""
        return digest(self._copies())

    def serve(self, gradient: Tensor | None) -> tuple[str, dict[str, Tensor]]:
        """For a peer: digest and copies. The lock must be held. ``gradient``: agreed, and not applied yet."""
        tensors = self._copies()
        if gradient is not None:
            tensors[_GRADIENT] = gradient
        return digest(tensors), tensors

    def hold(self) -> bool:
        """Takes the lock within a second; False when a step lasts longer."""
        return self.lock.acquire(timeout=_LOCK_S)

    def check(self, claimed: str, tensors: Mapping[str, Tensor]) -> Fetched:
        """A peer's answer, in memory of its own.

        Raises:
            ValueError: it is damaged, or not of this model.
        """
        params = tensors.get(_PARAMS)
        if params is None or params.dtype != torch.float32 or tuple(params.shape) != (self._view.numel,):
            raise ValueError("the fetched model does not fit this one; give all replicas the same model")
        own = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        if (found := digest(own)) != claimed:
            raise ValueError(
                f"the fetched model has digest {found[:12]}, expected {claimed[:12]}; it was damaged on the way; "
                "fetch it again"
            )
        inner = {name: t for name, t in own.items() if name.startswith(_INNER)}
        return Fetched(own[_PARAMS], inner, own.get(_GRADIENT), own)

    @torch.no_grad()
    def put(self, fetched: Fetched) -> None:
        """Takes a peer's model and inner state. Training thread, under the lock."""
        used_here(fetched.tensors.values())
        self._view.write(fetched.params.to(self._view.device))
        for name, parameter, group, optimizer in self._owners:
            state: dict[str, object] = {}
            for key, tensor in fetched.inner.items():
                place, _, what = key.removeprefix(_INNER).rpartition("/")
                if place != name:
                    continue
                if what.startswith(_NUMBER):
                    state[what.removeprefix(_NUMBER)] = tensor.item()
                else:
                    state[what] = tensor.to(device_of(what, tensor, parameter, group), copy=True)
            optimizer.state[parameter] = state

    def _copies(self) -> dict[str, Tensor]:
        tensors = {_PARAMS: self._view.read(self._view.empty())}
        for name, parameter, _, optimizer in self._owners:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{_INNER}{name}/{key}"] = value.detach().clone()
                elif isinstance(value, int | float):
                    tensors[f"{_INNER}{name}/{_NUMBER}{key}"] = torch.tensor(float(value), dtype=torch.float64)
        return tensors


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, else the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
