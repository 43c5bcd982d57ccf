"""What a checkpoint has of a training loop besides the optimizer: users' objects with a state dict, and the generators.

Each rank of an island has its own. What all ranks have alike is saved once, and restored in a replica of any size; the
rest, for as many ranks. A sharded tensor (`DTensor`) is saved as this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ftopt.errors import UserError
from ftopt.optimizer.tensors.flat import local
from ftopt.rng import get_rng_state, set_rng_state
from ftopt.tree import Tree

GENERATORS = "$generators"
"""Among the objects' names: the random number generators."""
_PART, _OF = "$part", "$of"


class Stateful(Protocol):
    """Anything with a state dict: schedulers, samplers, ``torchdata.StatefulDataLoader``, ..."""

    def state_dict(self) -> Any:
        """Returns plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restores what `state_dict` returned."""


@dataclass(frozen=True)
class SavedLoop:
    """The loop as a checkpoint holds it, or nothing of it.

    Args:
        states: name -> state, of each rank; ranks other than 0 have what differs from rank 0's.
    """

    states: Sequence[Mapping[str, Any]] = field(default=({},))

    def names(self) -> list[str]:
        """The objects' names."""
        return [name for name in self.states[0] if name != GENERATORS]

    def of(self, name: str, rank: int, size: int) -> Any:
        """What rank ``rank`` of ``size`` restores. LookupError: its states are those of another number of ranks."""
        differs = any(name in each for each in self.states[1:])
        if differs and len(self.states) != size:
            raise LookupError(f"holds a state of {name!r} for each of {len(self.states)} ranks; here are {size}")
        return self.states[rank][name] if differs and name in self.states[rank] else self.states[0][name]


class Loop:
    """This rank's objects.

    Attributes:
        watched: by name.
    """

    def __init__(self) -> None:
        self.watched: dict[str, Stateful] = {}

    def add(self, state: Mapping[str, Stateful]) -> None:
        """UserError: one has no state dict."""
        for name, each in state.items():
            if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
                raise UserError(
                    f"include({name}=...): a {type(each).__name__} without state_dict() and load_state_dict(); leave "
                    "it out, or give what has them"
                )
        self.watched |= state

    def capture(self, copy: Callable[[Tensor], Tensor]) -> Tree:
        """Their states, and the generators: training goes on while they are written. All ranks call this alike: a
        state dict may be collective."""
        states = {name: _captured(each.state_dict(), copy) for name, each in sorted(self.watched.items())}
        return states | {GENERATORS: get_rng_state()}

    def restore(self, name: str, state: Any) -> None:
        """Gives an object its state back. UserError: a sharded tensor is sharded in another way now."""
        each = self.watched[name]
        each.load_state_dict(_fitted(state, each.state_dict(), name) if _has_parts(state) else state)

    def behind(self, step: int) -> list[tuple[str, LRScheduler]]:
        """Schedules of the learning rate that count for themselves, and fewer steps than ``step``. `LambdaLR` is not
        looked at: its function may go by the job's inner step."""
        count = [(name, x) for name, x in self.watched.items() if isinstance(x, LRScheduler)]
        own = [(name, x) for name, x in count if not isinstance(x, LambdaLR | ReduceLROnPlateau)]
        return [(name, x) for name, x in own if x.last_epoch < step]

    def restore_generators(self, saved: SavedLoop, rank: int, size: int) -> bool:
        """Returns whether the checkpoint holds this rank's; rank 0 of another number of ranks goes on with rank 0's."""
        if GENERATORS not in saved.states[0]:
            return True
        if len(saved.states) == size or rank == 0:
            set_rng_state(saved.states[rank].get(GENERATORS, saved.states[0][GENERATORS]))
        return len(saved.states) == size


def _captured(value: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor) and hasattr(value, "device_mesh"):
        return {_PART: copy(local(value)), _OF: list(value.shape)}
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
        return copy(value.detach())
    if isinstance(value, Mapping):
        return {key: _captured(item, copy) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_captured(item, copy) for item in value)
    if type(value).__module__ == "numpy" and hasattr(value, "copy"):
        return value.copy()
    return value


def _has_parts(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _PART in value or any(map(_has_parts, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_parts, value))


def _fitted(value: Any, now: Any, where: str) -> Any:
    """Parts as sharded tensors again, placed as the object's own (``now``) are."""
    if isinstance(value, Mapping):
        if _PART in value:
            return _whole(value[_PART], list(value[_OF]), now, where)
        inside = now if isinstance(now, Mapping) else {}
        return {key: _fitted(item, inside.get(key), f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        has = now if isinstance(now, list | tuple) and len(now) == len(value) else [None] * len(value)
        return type(value)(_fitted(v, n, f"{where}.{i}") for i, (v, n) in enumerate(zip(value, has, strict=True)))
    return value


def _whole(part: Tensor, shape: list[int], now: Any, where: str) -> Tensor:
    from torch.distributed.tensor import DTensor

    mine = local(now) if isinstance(now, DTensor) else None
    if mine is None or mine.shape != part.shape or list(now.shape) != shape:
        found = "no sharded tensor" if mine is None else f"{tuple(mine.shape)} of {tuple(now.shape)}"
        raise UserError(
            f"{where} was saved as a part, {tuple(part.shape)}, of a sharded tensor, {tuple(shape)}, and is {found} "
            "here; include the object when it has its tensors, with the layout that it had"
        )
    made: Tensor = DTensor.from_local(
        part.to(mine.device), now.device_mesh, now.placements, run_check=False, shape=now.shape, stride=now.stride()
    )
    return made
