"""Gradients as a fragment: what a method exchanges that averages them instead of parameters.

To the outer step a `GradientView` is a view like that of parameters: its values are *minus the sum of the gradients
that no round has counted yet*, its anchor is 0. So freezing, counting once and carrying over what came too late are the
same code for both. Applying a committed state means one step of the inner optimizers with the agreed gradient (`Live`).

Behind the gradients lies one element for each parameter: above 0 if any of these backward passes has given it a
gradient, be it exactly 0. Its mean is above 0 if that is so for any member of a round. It is agreed like the gradient,
so that all replicas step the same parameters, and weight decay and momentum do not move one that nobody has used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ftopt.methods import GRADIENT
from ftopt.optimizer.inner import Inner, device_of
from ftopt.optimizer.tensors.digest import digest
from ftopt.optimizer.tensors.flat import FlatView, local, trainable
from ftopt.streams import used_here

PRESENT = "present"
"""The outer state's name for those elements."""
_PARAMS, _INNER, _NUMBER = "params", "inner.", "number."


class GradientView(FlatView):
    """Minus the sum of the gradients of the model's parameters that train, flat fp32: what `read` and `write` mean;
    behind it, for each parameter, whether it has one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.numel += len(self._parameters)
        self.carried, self.measured = slice(0, self.numel), self.trained
        self._sum = torch.zeros(self.numel, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def add(self, times: float = 1.0) -> None:
        """Adds the gradients at hand, multiplied by ``times``, to the sum."""
        for parameter, place in zip(self._parameters, self._views(self._sum[: self.trained]), strict=True):
            if parameter.grad is not None:
                place.sub_(local(parameter.grad), alpha=times)
        present = [float(parameter.grad is not None) for parameter in self._parameters]
        self._sum[self.trained :].add_(torch.tensor(present).to(self.device, non_blocking=True))

    @torch.no_grad()
    def give(self, agreed: Mapping[str, Tensor]) -> None:
        """Writes the agreed gradient into the parameters' gradients: None where nobody had one, unless a codec has left
        something out of earlier ones."""
        parts = self._views(agreed[GRADIENT].to(self.device))
        for parameter, part, present in zip(self._parameters, parts, agreed[PRESENT].tolist(), strict=True):
            if not present > 0 and not bool(part.any()):
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            local(parameter.grad).copy_(part)

    def read(self, out: Tensor) -> Tensor:
        return out.copy_(self._sum)

    def parts(self, size: int) -> Iterator[tuple[Tensor, slice]]:
        for part in torch.split(self._sum, size):
            start = part.storage_offset()
            yield part, slice(start, start + part.numel())

    def write(self, flat: Tensor) -> None:
        self._sum.copy_(flat)

    def cast(self, flat: Tensor) -> Tensor:
        return flat  # sums are fp32 whatever the parameters are

    def clones(self) -> list[Tensor]:
        return [self._sum.clone()]

    def restore(self, clones: Sequence[Tensor]) -> None:
        self._sum.copy_(clones[0])


class Live:
    """The model and the inner optimizers' state as part of the committed state: all replicas step alike.

    They change with every step, so that peers are served a copy made between two steps. ``lock`` is held while a step
    is applied.
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
        """The digest of the model and the inner state as they are."""
        return digest(self._copies())

    def serve(self, agreed: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
        """For a peer: digest and copies. The lock must be held. ``agreed``: on a gradient that is not applied yet."""
        tensors = self._copies() | dict(agreed)
        return digest(tensors), tensors

    def check(self, claimed: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A peer's answer, in memory of its own. ValueError: it is damaged, or not of this model."""
        params = tensors.get(_PARAMS)
        if params is None or params.dtype != torch.float32 or tuple(params.shape) != (self._view.numel,):
            raise ValueError("the fetched model does not fit this one; give all replicas the same model")
        own = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        if (found := digest(own)) != claimed:
            raise ValueError(
                f"the fetched model has digest {found[:12]}, expected {claimed[:12]}; it was damaged on the way; "
                "fetch it again"
            )
        return own

    @torch.no_grad()
    def put(self, fetched: Mapping[str, Tensor]) -> None:
        """Replaces model and inner state by a peer's. Training thread, under the lock."""
        used_here(fetched.values())
        self._view.write(fetched[_PARAMS].to(self._view.device))
        for name, parameter, group, optimizer in self._owners:
            state: dict[str, object] = {}
            for key, tensor in fetched.items():
                place, _, what = key.rpartition("/")
                if place != _INNER + name:
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
