"""A training loop's state in a checkpoint, besides the optimizer.

It consists of users' objects with a state dict, the modules' extra state, and the random number generators. Each rank
of an island has its own. A state that all ranks share is saved once, and can be restored in a replica of any size;
other states need the same number of ranks. A sharded tensor (`DTensor`) is saved as this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from ftopt.common.rng import get_rng_state, set_rng_state
from ftopt.common.tree import Tree, flatten, rebuilt
from ftopt.errors import UserError
from ftopt.optimizer.saved import extra_state
from ftopt.step.tensors.flat import local

GENERATORS, EXTRA = "$generators", "$extra"
"""Names, among the objects', of the random number generators and the modules' extra state."""


class Stateful(Protocol):
    """Anything with a state dict: schedulers, samplers, ``torchdata.StatefulDataLoader``, ..."""

    def state_dict(self) -> Any:
        """Returns plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restores what `state_dict` returned."""


@dataclass(frozen=True)
class Part:
    """This rank's part of a sharded tensor of shape ``shape``."""

    tensor: Tensor
    shape: list[int]


@dataclass(frozen=True)
class SavedLoop:
    """A loop's state in a checkpoint, or an empty one.

    Args:
        states: for each rank, name -> state; ranks other than 0 have only states that differ from rank 0's.
    """

    states: Sequence[Mapping[str, Any]] = field(default=({},))

    def names(self) -> list[str]:
        """The objects' names."""
        return [name for name in self.states[0] if name not in (GENERATORS, EXTRA)]

    def of(self, name: str, rank: int, size: int) -> Any:
        """The state that rank ``rank`` of ``size`` restores. LookupError: the states are of a different number of
        ranks."""
        differs = any(name in each for each in self.states[1:])
        if differs and len(self.states) != size:
            raise LookupError(f"holds a state of {name!r} for each of {len(self.states)} ranks; here are {size}")
        return self.states[rank][name] if differs and name in self.states[rank] else self.states[0][name]


class Loop:
    """This rank's objects, and its model.

    Attributes:
        watched: the objects, by name.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.watched: dict[str, Stateful] = {}
        self._model = model
        self._unchecked: set[str] = set()

    def add(self, state: Mapping[str, Stateful]) -> None:
        """Adds objects. UserError: one has no state dict."""
        for name, each in state.items():
            if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
                raise UserError(
                    f"include({name}=...): a {type(each).__name__} without state_dict() and load_state_dict(); leave "
                    "it out, or give what has them"
                )
        self.watched |= state
        self._unchecked |= state.keys()

    def check(self, *, begun: bool) -> None:
        """Refuses, with a UserError, an object whose state dict holds a value that a checkpoint cannot; checks each
        once.

        Args:
            begun: training has begun. Until then iterable objects are not checked, since a loader's state dict may
                start its workers.
        """
        for name in sorted(self._unchecked):
            each = self.watched[name]
            if isinstance(each, Iterable) and not begun:
                continue
            self._unchecked.discard(name)
            try:
                state = each.state_dict()
            except Exception:  # it has no state yet; the first checkpoint asks again, and raises
                continue
            try:
                flatten(_captured(state, lambda tensor: tensor), {}, name)
            except UserError as error:
                advice = "leave it out of state_dict(), or give it as one of these"
                raise UserError(f"checkpoints.include({name}=...): {error}; {advice}") from None

    def capture(self, copy: Callable[[Tensor], Tensor]) -> Tree:
        """Copies of the objects' states and the generators, since training goes on while they are written. All ranks
        call this, since a state dict may be collective."""
        states = {name: _captured(each.state_dict(), copy) for name, each in sorted(self.watched.items())}
        extra = {} if self._model is None else extra_state.capture(self._model, copy)
        return states | ({EXTRA: extra} if extra else {}) | {GENERATORS: get_rng_state()}

    def restore(self, name: str, state: Any) -> None:
        """Restores an object's state. UserError: a sharded tensor is sharded differently now."""
        each = self.watched[name]
        each.load_state_dict(_fitted(state, each, name))
        self._unchecked.discard(name)

    def restore_extra(self, saved: SavedLoop, rank: int, size: int) -> None:
        """Restores the modules' extra state. LookupError: as `SavedLoop.of`."""
        if self._model is not None and EXTRA in saved.states[0]:
            extra_state.restore(self._model, saved.of(EXTRA, rank, size))

    def restore_generators(self, saved: SavedLoop, rank: int, size: int) -> bool:
        """Restores the generators; returns whether the checkpoint holds this rank's. If the number of ranks differs,
        only rank 0 restores its own."""
        if GENERATORS not in saved.states[0]:
            return True
        if len(saved.states) == size or rank == 0:
            set_rng_state(saved.states[rank].get(GENERATORS, saved.states[0][GENERATORS]))
        return len(saved.states) == size


def _captured(value: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    def copied(tensor: Tensor, where: str) -> Any:
        if hasattr(tensor, "device_mesh"):
            return Part(copy(local(tensor)), list(tensor.shape))
        found = copy(tensor.detach())
        return nn.Parameter(found, requires_grad=tensor.requires_grad) if type(tensor) is nn.Parameter else found

    return rebuilt(value, copied)


def _fitted(value: Any, each: Stateful, name: str) -> Any:
    """The value with its parts turned into sharded tensors, placed like the object's own."""
    parts: list[Part] = []
    rebuilt(value, lambda part, where: parts.append(part), leaves=Part)
    if not parts:
        return value
    now: dict[str, Tensor] = {}
    rebuilt(each.state_dict(), lambda tensor, where: now.setdefault(where, tensor), name)
    return rebuilt(value, lambda part, where: _whole(part, now.get(where), where), name, leaves=Part)


def _whole(saved: Part, now: Tensor | None, where: str) -> Tensor:
    from torch.distributed.tensor import DTensor

    part, shape = saved.tensor, list(saved.shape)
    mine = local(now) if isinstance(now, DTensor) else None
    if not isinstance(now, DTensor) or mine is None or mine.shape != part.shape or list(now.shape) != shape:
        found = "no sharded tensor" if mine is None or now is None else f"{tuple(mine.shape)} of {tuple(now.shape)}"
        raise UserError(
            f"{where} was saved as a part, {tuple(part.shape)}, of a sharded tensor, {tuple(shape)}, and is {found} "
            "here; include the object when it has its tensors, with the layout that it had"
        )
    made: Tensor = DTensor.from_local(
        part.to(mine.device), now.device_mesh, now.placements, run_check=False, shape=now.shape, stride=now.stride()
    )
    return made
