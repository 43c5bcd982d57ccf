"""The model and inner state of replicas that take the same steps: served, fetched, compared."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ftopt.common.streams import used_here
from ftopt.errors import UserError
from ftopt.methods.sync_sgd import GRADIENT
from ftopt.step.inner import Inner, device_of
from ftopt.step.tensors.digest import block_sums, digest, largest
from ftopt.step.tensors.flat import FlatView, local, placed, trainable
from ftopt.step.tensors.packed import as_tensor, changed, marks, of_tensor, pack, pack_pairs, unpack

_LET_IN_S = 1.0
"""Seconds that a call of the optimizer waits for a reader, which checks every few milliseconds."""
_LOOK_S = 0.001
_PARAMS, _INNER, _GROUPS, _RATE = "params", "inner", "groups", "rate."
_CHUNK = 1 << 20
"""Elements compared at a time, which fit in a CPU's cache."""
_SQUARES = ("exp_avg_sq", "square_avg", "/sum")
_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
"""Dtypes compared as numbers; others are compared as bytes."""


class Live:
    """The model and the inner optimizers' state, equal on all replicas, which take the same steps.

    Between two calls of its optimizer user code may put other weights into the model (an average of weights, to
    evaluate it). So other threads read the model only while the training thread is `at_rest`; a copy that was set aside
    they may read at any time. ``lock`` is held while a step is applied, and while another thread reads.

    Args:
        buffers: names of the buffers that belong to it, since they are averaged. Each replica has its own others.
        states: the optimizers that keep the state of the model's parameters, if not ``inner``'s own, which then hold
            parts of these parameters.

    Attributes:
        view: the parameters and those buffers.
        counted: for each parameter group, the keys that steps of the inner optimizers change, such as a count. They
            belong to the inner state; all other keys are set by the replica's own schedulers.
    """

    def __init__(
        self, model: nn.Module, inner: Inner, *, buffers: Collection[str] = (), states: Inner | None = None
    ) -> None:
        self.lock = threading.Lock()
        self.view = FlatView(model, buffers=buffers)
        self._inner = inner
        self._own: list[Tensor] | None = None
        self._at_rest = False
        self._readers = set[object]()
        self.counted: list[list[str]] = [[] for _ in inner.param_groups]
        names = {id(p): name for name, p in trainable(model)}
        optimizers = (inner if states is None else states).optimizers
        self._owners = [
            (names[id(p)], p, group, optimizer)
            for optimizer, real in zip(optimizers, inner.optimizers, strict=True)
            for own, group in zip(optimizer.param_groups, real.param_groups, strict=True)
            for p in own["params"]
            if id(p) in names
        ]
        self._owners.sort(key=lambda owner: owner[0])

    def set_aside(self, clones: list[Tensor]) -> None:
        """Notes that other parameters are in the model for a while, for example to evaluate them. ``clones`` of the
        view hold the replica's own, which peers get."""
        with self.lock:
            self._own = clones

    def are_back(self) -> None:
        """Notes that the replica's own parameters are in the model again."""
        with self.lock:
            self._own = None

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Lets other threads read the model, within a call of the optimizer, when the model holds the replica's own
        parameters. Waiting readers go first. Training thread."""
        if self._at_rest:
            yield
            return
        try:
            self._at_rest = True
            ends_s = time.monotonic() + _LET_IN_S
            while self._readers and time.monotonic() < ends_s:
                time.sleep(_LOOK_S)
            yield
        finally:
            self._at_rest = False
            with self.lock:
                pass  # waits for the last reader

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Surrounds a reader's wait for `at_rest`. Any other thread."""
        reader = object()
        self._readers.add(reader)
        try:
            yield
        finally:
            self._readers.discard(reader)

    @property
    def readable(self) -> bool:
        """Whether this replica's own parameters are in the model or set aside. The lock must be held."""
        return self._at_rest or self._own is not None

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[bool]:
        """Yields whether the parameters can be read; waits up to ``timeout_s`` for the training thread to be
        `at_rest`."""
        ends_s = time.monotonic() + timeout_s
        with self.awaited():
            while True:
                with self.lock:
                    if self.readable or time.monotonic() >= ends_s:
                        yield self.readable
                        return
                time.sleep(_LOOK_S)

    def digest(self) -> str:
        """The digest of the present model and inner state."""
        return digest(self._copies())

    @torch.no_grad()
    def compared(self) -> tuple[str, float]:
        """A digest of the present parameters and inner state, and their largest absolute value (infinity for NaN;
        without counters). Omits inner state in tensor subclasses. Allocates nothing of their size. The lock must be
        held."""
        sha, peak = hashlib.sha256(), 0.0
        packed, inner = self._inner_state()
        sha.update(json.dumps(packed).encode())
        named = sorted(self._compared_tensors(inner), key=lambda item: (*_kind(item[1]), item[0]))
        for (counts, *_), run in groupby(named, key=lambda item: _kind(item[1])):
            items = list(run)
            sha.update("\0".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in items).encode())
            for chunk in _chunks([tensor for _, tensor in items]):
                sha.update(block_sums(chunk).numpy().astype("<i8").tobytes())
                if chunk.dtype in _NUMBERS and not counts:
                    peak = max(peak, largest(chunk))
        squares = [tensor for name, tensor in inner.items() if name.endswith(_SQUARES)]
        if any(bool((square < 0).any()) for square in squares):
            peak = math.inf  # no training gives a negative mean of squares
        return sha.hexdigest(), peak

    def check_travels(self) -> None:
        """UserError: the inner state holds a value that cannot be sent to a joining replica. Nothing is copied."""
        try:
            self._inner_state()
            self._group_state()
        except UserError as error:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in self._inner.optimizers)
            raise UserError(
                f"this method gives the inner state to each replica that joins, which is impossible with the state of "
                f"{kinds}: {error}; use another inner optimizer, or a method whose replicas keep inner states of their "
                "own, such as DiLoCo"
            ) from None

    def serve(self, agreed: Mapping[str, Tensor], known: str = "") -> tuple[str, dict[str, Tensor]] | None:
        """For a peer: digest and copies, with ``agreed`` tensors of the outer state. The lock must be held.

        A gradient is accompanied by the numbers of the inner optimizers' groups, for the next step: a newcomer's
        schedule has not begun. None: it is not `readable`, and its digest is not ``known``. LookupError: the inner
        state cannot be sent.
        """
        try:
            packed, counted = self._group_state()
            copies = self._copies() if self.readable else self._copies_of(known)
            if copies is None:
                return None
            tensors = copies | {name: tensor.clone() for name, tensor in counted.items()} | dict(agreed)
            if any(packed):
                tensors[_GROUPS] = as_tensor(packed)
        except UserError as error:
            raise LookupError(f"its inner state cannot be given away: {error}") from None
        if GRADIENT in agreed:
            for i, group in enumerate(self._inner.param_groups):
                rates = {key: value for key, value in group.items() if _is_rate(value)}
                tensors |= {
                    f"{_RATE}{i}.{key}": torch.as_tensor(x, dtype=torch.float64).cpu() for key, x in rates.items()
                }
        return digest(tensors), tensors

    @contextmanager
    def stepping(self, fetched: Mapping[str, Tensor]) -> Iterator[None]:
        """Surrounds one step of the inner optimizers, with the numbers that came with a fetched gradient, if any. Group
        values that the step itself changes stay, and belong to the inner state from then on."""
        replaced = list[tuple[int, dict[str, Any], str, object]]()
        groups = self._inner.param_groups
        for i, group in enumerate(groups):
            for key, own in group.items():
                if _is_rate(own) and (rate := fetched.get(f"{_RATE}{i}.{key}")) is not None:
                    replaced.append((i, group, key, own))
                    group[key] = _like(own, rate)
        before = [marks(group) for group in groups]
        try:
            yield
        finally:
            moved = [changed(was, marks(group)) for was, group in zip(before, groups, strict=True)]
            self.counted = [sorted({*keys, *more}) for keys, more in zip(self.counted, moved, strict=True)]
            for i, group, key, own in replaced:
                if key not in moved[i]:
                    group[key] = own

    @staticmethod
    def small(fetched: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The data of a fetched state that ranks other than 0 need to take the same step: whether a gradient came with
        it, and the numbers of the groups."""
        rates = {name: tensor for name, tensor in fetched.items() if name.startswith(_RATE)}
        return rates | ({GRADIENT: torch.empty(0)} if GRADIENT in fetched else {})

    def check(self, claimed: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checked copy of a peer's answer. ValueError: it is damaged, or of another model."""
        params = tensors.get(_PARAMS)
        if params is None or params.dtype != torch.float32 or tuple(params.shape) != (self.view.numel,):
            raise ValueError("the fetched model does not fit this one; give all replicas the same model")
        own = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        if (found := digest(own)) != claimed:
            raise ValueError(
                f"the fetched model has digest {found[:12]}, expected {claimed[:12]}; it was damaged on the way; "
                "fetch it again"
            )
        try:
            self._read(own)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the fetched inner state does not fit this optimizer: {error}") from None
        return own

    @torch.no_grad()
    def put(self, fetched: Mapping[str, Tensor]) -> None:
        """Replaces model and inner state by a peer's. Training thread, under the lock."""
        used_here(fetched.values())
        self.view.write(fetched[_PARAMS].to(self.view.device))
        state, others, groups = self._read(fetched)
        for optimizer, pairs in zip(self._inner.optimizers, others, strict=True):
            for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
                del optimizer.state[key]
            optimizer.state.update({unpack(key, fetched): unpack(value, fetched) for key, value in pairs})
        for name, parameter, group, optimizer in self._owners:
            optimizer.state[parameter] = {}
            for key, value in state.get(name, []):
                what = unpack(key, fetched)
                place = partial(_beside, str(what), parameter, group)
                optimizer.state[parameter][what] = unpack(value, fetched, place)
        for i, (group, values) in enumerate(zip(self._inner.param_groups, groups, strict=True)):
            group.update({key: unpack(value, fetched) for key, value in values.items()})
            self.counted[i] = sorted({*self.counted[i], *values})

    def _copies_of(self, known: str) -> dict[str, Tensor] | None:
        """Copies with the digest ``known``, whatever user code does to the model meanwhile."""
        try:
            copies = self._copies() if known else {}
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # such as another dtype or shape
            return None
        return copies if known and digest(copies) == known else None

    def _copies(self) -> dict[str, Tensor]:
        tensors = {_PARAMS: self.view.read(self.view.empty(), self._own)}
        packed, inner = self._inner_state()
        tensors |= {name: tensor.clone() for name, tensor in inner.items()}
        return tensors | ({_INNER: as_tensor(packed)} if any(packed) else {})

    def _compared_tensors(self, inner: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        aside = {} if self._own is None else dict(zip(self.view.names, self._own, strict=True))
        yield from ((name, aside.get(name, local(parameter))) for name, parameter, _, _ in self._owners)
        for name, own in inner.items():
            yield name, own if own.dtype in _NUMBERS else own.contiguous().reshape(-1).view(torch.uint8)

    def _inner_state(self) -> tuple[list[Any], dict[str, Tensor]]:
        """The packed inner state in two parts, that of parameters and the rest of the optimizers' ``state``; and the
        tensors in it, by reference. UserError: it holds a value that cannot be packed."""
        tensors = dict[str, Tensor]()
        state = {
            name: pack_pairs(held.items(), tensors, f"{_INNER}.{name}/")
            for name, parameter, _, optimizer in self._owners
            if (held := optimizer.state.get(parameter))
        }
        others = [
            pack_pairs(((k, v) for k, v in o.state.items() if not isinstance(k, Tensor)), tensors, f"{_INNER}//{i}/")
            for i, o in enumerate(self._inner.optimizers)
        ]
        return [state, others if any(others) else []], tensors

    def _group_state(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """The same for the keys that the inner optimizers count in their groups."""
        tensors = dict[str, Tensor]()
        groups = zip(self._inner.param_groups, self.counted, strict=True)
        packed = [
            {key: pack(group[key], tensors, f"{_GROUPS}.{i}/{key}") for key in keys if key in group}
            for i, (group, keys) in enumerate(groups)
        ]
        return packed, tensors

    def _read(self, fetched: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[Any], list[dict[str, Any]]]:
        """A peer's packed state of parameters, its other state, and the counts in its groups. ValueError: it does not
        fit."""
        state, others = of_tensor(fetched[_INNER]) if _INNER in fetched else ({}, [])
        groups = of_tensor(fetched[_GROUPS]) if _GROUPS in fetched else [{} for _ in self._inner.param_groups]
        others = others or [[] for _ in self._inner.optimizers]
        if strangers := state.keys() - {name for name, *_ in self._owners}:
            raise ValueError(f"it has state of {', '.join(sorted(strangers))}")
        if (len(others), len(groups)) != (len(self._inner.optimizers), len(self._inner.param_groups)):
            raise ValueError("it has another number of optimizers, or of parameter groups")
        return state, others, groups


def _beside(key: str, parameter: Tensor, group: Mapping[str, Any], tensor: Tensor) -> Tensor:
    """A tensor of a parameter's state, on the device where torch keeps it."""
    return placed(tensor.to(device_of(key, tensor, parameter, group)), parameter)


def _is_rate(value: object) -> bool:
    """Whether a group's value is a number or several numbers (Adam's betas)."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(part, float) for part in value)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _like(own: object, rate: Tensor) -> object:
    """A fetched rate in the form of the group's ``own``."""
    if isinstance(own, Tensor):
        return torch.full_like(own, rate.item())
    return tuple(rate.tolist()) if isinstance(own, tuple) else type(own)(rate.item())  # type: ignore[call-arg]


def _kind(tensor: Tensor) -> tuple[bool, str, str]:
    """Whether a tensor is a counter, its dtype and its device. Tensors of one kind can be joined."""
    return tensor.dim() == 0, str(tensor.dtype), str(tensor.device)


def _chunks(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Tensors of one dtype and device as flat pieces: large tensors cut, small ones joined."""
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
