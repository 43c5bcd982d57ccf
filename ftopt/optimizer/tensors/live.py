"""The model and inner state of replicas that take every step alike: served, fetched, compared."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ftopt.methods import GRADIENT
from ftopt.optimizer.inner import Inner, device_of
from ftopt.optimizer.tensors.digest import block_sums, digest, largest
from ftopt.optimizer.tensors.flat import FlatView, local, placed, trainable
from ftopt.streams import used_here

_PARAMS, _INNER, _NUMBER, _RATE = "params", "inner.", "number.", "rate."
_CHUNK = 1 << 20
"""Elements that are compared at a time: in a CPU's cache."""
_SQUARES = ("exp_avg_sq", "square_avg", "/sum")
_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
"""Others are compared as bytes."""


class Live:
    """The model and the inner optimizers' state, which all replicas have alike, since they step alike.

    They change with every step, so that peers are served a copy made between two steps. ``lock`` is held while a step
    is applied.

    Args:
        buffers: names of buffers that belong to it, since they are averaged. Others are each replica's own.

    Attributes:
        view: the parameters and those buffers.
    """

    def __init__(self, model: nn.Module, inner: Inner, *, buffers: Collection[str] = ()) -> None:
        self.lock = threading.Lock()
        self.view = FlatView(model, buffers=buffers)
        self._inner = inner
        self._own: list[Tensor] | None = None
        names = {id(p): name for name, p in trainable(model)}
        self._owners = [
            (names[id(p)], p, group, optimizer)
            for optimizer in inner.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in names
        ]

    def set_aside(self, clones: list[Tensor]) -> None:
        """Other parameters come into the model for a while, to evaluate them, say: the replica's own are ``clones`` of
        the view. Peers get these."""
        with self.lock:
            self._own = clones

    def are_back(self) -> None:
        """The replica's own parameters are in the model again."""
        with self.lock:
            self._own = None

    def digest(self) -> str:
        """The digest of the model and the inner state as they are."""
        return digest(self._copies())

    @torch.no_grad()
    def compared(self) -> tuple[str, float]:
        """A digest of the parameters and the inner state as they are, and their largest absolute value (infinity for
        NaN; counters left out). Inner states of tensor classes of their own are left out. Nothing of their size is
        allocated. The lock must be held."""
        sha, peak = hashlib.sha256(), 0.0
        named = sorted(self._compared_tensors(), key=lambda item: (*_kind(item[1]), item[0]))
        for (counts, *_), run in groupby(named, key=lambda item: _kind(item[1])):
            items = list(run)
            sha.update("\0".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in items).encode())
            for chunk in _chunks([tensor for _, tensor in items]):
                sha.update(block_sums(chunk).numpy().astype("<i8").tobytes())
                if chunk.dtype in _NUMBERS and not counts:
                    peak = max(peak, largest(chunk))
        squares = [t for name, t in self._inner_tensors() if name.endswith(_SQUARES)]
        if any(bool((square < 0).any()) for square in squares):
            peak = math.inf  # a mean of squares that no training makes
        return sha.hexdigest(), peak

    def serve(self, agreed: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
        """For a peer: digest and copies, with ``agreed`` tensors of the outer state. The lock must be held.

        With a gradient go the numbers of the inner optimizers' groups, for the step that is about to be taken: a
        newcomer's schedule has not begun.
        """
        tensors = self._copies() | dict(agreed)
        if GRADIENT in agreed:
            for i, group in enumerate(self._inner.param_groups):
                rates = {key: value for key, value in group.items() if _is_rate(value)}
                tensors |= {
                    f"{_RATE}{i}.{key}": torch.as_tensor(x, dtype=torch.float64).cpu() for key, x in rates.items()
                }
        return digest(tensors), tensors

    @contextmanager
    def at_rates(self, fetched: Mapping[str, Tensor]) -> Iterator[None]:
        """The inner optimizers' groups have the numbers that came with a fetched gradient, if there are any."""
        replaced = list[tuple[dict[str, Any], str, object]]()
        try:
            for i, group in enumerate(self._inner.param_groups):
                for key, own in group.items():
                    if _is_rate(own) and (rate := fetched.get(f"{_RATE}{i}.{key}")) is not None:
                        replaced.append((group, key, own))
                        group[key] = _like(own, rate)
            yield
        finally:
            for group, key, own in replaced:  # no others: a step may count in its groups
                group[key] = own

    def check(self, claimed: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A peer's answer, in memory of its own. ValueError: it is damaged, or not of this model."""
        params = tensors.get(_PARAMS)
        if params is None or params.dtype != torch.float32 or tuple(params.shape) != (self.view.numel,):
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
        self.view.write(fetched[_PARAMS].to(self.view.device))
        for name, parameter, group, optimizer in self._owners:
            state: dict[str, object] = {}
            for key, tensor in fetched.items():
                place, _, what = key.rpartition("/")
                if place != _INNER + name:
                    continue
                if what.startswith(_NUMBER):
                    state[what.removeprefix(_NUMBER)] = tensor.item()
                else:
                    own = tensor.to(device_of(what, tensor, parameter, group), copy=True)
                    state[what] = placed(own, parameter)
            optimizer.state[parameter] = state

    def _copies(self) -> dict[str, Tensor]:
        tensors = {_PARAMS: self.view.read(self.view.empty(), self._own)}
        return tensors | {_INNER + name: tensor.detach().clone() for name, tensor in self._inner_tensors()}

    def _compared_tensors(self) -> Iterator[tuple[str, Tensor]]:
        aside = {} if self._own is None else dict(zip(self.view.names, self._own, strict=True))
        yield from ((name, aside.get(name, local(parameter))) for name, parameter, _, _ in self._owners)
        for name, own in self._inner_tensors():
            if type(own) is Tensor:  # quantized states (torchao's) know few operations
                yield name, own if own.dtype in _NUMBERS else own.contiguous().reshape(-1).view(torch.uint8)

    def _inner_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter, _, optimizer in self._owners:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name}/{key}", local(value)
                elif isinstance(value, int | float):
                    yield f"{name}/{_NUMBER}{key}", torch.tensor(float(value), dtype=torch.float64)


def _is_rate(value: object) -> bool:
    """Whether a value of a group is a number, or several (Adam's betas)."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(part, float) for part in value)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _like(own: object, rate: Tensor) -> object:
    """A fetched rate as a value like the group's ``own``."""
    if isinstance(own, Tensor):
        return torch.full_like(own, rate.item())
    return tuple(rate.tolist()) if isinstance(own, tuple) else type(own)(rate.item())  # type: ignore[call-arg]


def _kind(tensor: Tensor) -> tuple[bool, str, str]:
    """Tensors of one kind can be joined; whether it is a counter."""
    return tensor.dim() == 0, str(tensor.dtype), str(tensor.device)


def _chunks(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Tensors of one dtype and device as flat pieces: large ones cut, small ones joined."""
    small, size = list[Tensor](), 0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if small and size + flat.numel() > _CHUNK:
            yield torch.cat(small)
            small, size = [], 0
        if flat.numel() >= _CHUNK:
            yield from torch.split(flat, _CHUNK)
        elif flat.numel():
            small.append(flat)
            size += flat.numel()
    if small:
        yield torch.cat(small)
