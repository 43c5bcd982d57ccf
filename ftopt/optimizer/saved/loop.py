"""What a checkpoint has of a training loop besides the optimizer: users' objects with a state dict, what the model's
modules keep beside parameters and buffers, and the generators.

Each rank of an island has its own. What all ranks have alike is saved once, and restored in a replica of any size; the
rest, for as many ranks. A sharded tensor (`DTensor`) is saved as this rank's part of it.
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
"""Among the objects' names: the random number generators, and the modules' extra state."""


class Stateful(Protocol):
    """Anything with a state dict: schedulers, samplers, ``torchdata.StatefulDataLoader``, ..."""

    def state_dict(self) -> Any:
        """Returns plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restores what `state_dict` returned."""


@dataclass(frozen=True)
class Part:
    """This rank's part of a sharded tensor of that ``shape``."""

    tensor: Tensor
    shape: list[int]


@dataclass(frozen=True)
class SavedLoop:
    """The loop as a checkpoint holds it, or nothing of it.

    Args:
        states: name -> state, of each rank; ranks other than 0 have what differs from rank 0's.
    """

    states: Sequence[Mapping[str, Any]] = field(default=({},))

    def names(self) -> list[str]:
        """The objects' names."""
        return [name for name in self.states[0] if name not in (GENERATORS, EXTRA)]

    def of(self, name: str, rank: int, size: int) -> Any:
        """What rank ``rank`` of ``size`` restores. LookupError: its states are those of another number of ranks."""
        differs = any(name in each for each in self.states[1:])
        if differs and len(self.states) != size:
            raise LookupError(f"holds a state of {name!r} for each of {len(self.states)} ranks; here are {size}")
        return self.states[rank][name] if differs and name in self.states[rank] else self.states[0][name]


class Loop:
    """This rank's objects, and its model.

    Attributes:
        watched: by name.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.watched: dict[str, Stateful] = {}
        self._model = model
        self._unchecked: set[str] = set()

    def add(self, state: Mapping[str, Stateful]) -> None:
        """UserError: one has no state dict."""
        for name, each in state.items():
            if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
                raise UserError(
                    f"include({name}=...): a {type(each).__name__} without state_dict() and load_state_dict(); leave "
                    "it out, or give what has them"
                )
        self.watched |= state
        self._unchecked |= state.keys()

    def check(self, *, begun: bool) -> None:
        """Refuses, with a UserError, an object whose state dict holds what a checkpoint cannot; looks at each once.

        Args:
            begun: training has begun. Until then what is iterated over is not looked at: the state dict of a loader
                may start its workers.
        """
        for name in sorted(self._unchecked):
            each = self.watched[name]
            if isinstance(each, Iterable) and not begun:
                continue
            self._unchecked.discard(name)
            try:
                state = each.state_dict()
            except Exception:  # it has none yet: the first checkpoint asks again, and raises
                continue
            try:
                flatten(_captured(state, lambda tensor: tensor), {}, name)
            except UserError as error:
                advice = "leave it out of state_dict(), or give it as one of these"
                raise UserError(f"checkpoints.include({name}=...): {error}; {advice}") from None

    def capture(self, copy: Callable[[Tensor], Tensor]) -> Tree:
        """Their states, and the generators: training goes on while they are written. All ranks call this alike: a
        state dict may be collective."""
        states = {name: _captured(each.state_dict(), copy) for name, each in sorted(self.watched.items())}
        extra = {} if self._model is None else extra_state.capture(self._model, copy)
        return states | ({EXTRA: extra} if extra else {}) | {GENERATORS: get_rng_state()}

    def restore(self, name: str, state: Any) -> None:
        """Gives an object its state back. UserError: a sharded tensor is sharded in another way now."""
        each = self.watched[name]
        each.load_state_dict(_fitted(state, each, name))
        self._unchecked.discard(name)

    def restore_extra(self, saved: SavedLoop, rank: int, size: int) -> None:
        """Gives the model's modules their extra state back. LookupError: as `SavedLoop.of`."""
        if self._model is not None and EXTRA in saved.states[0]:
            extra_state.restore(self._model, saved.of(EXTRA, rank, size))

    def restore_generators(self, saved: SavedLoop, rank: int, size: int) -> bool:
        """Returns whether the checkpoint holds this rank's; rank 0 of another number of ranks goes on with rank 0's."""
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
    """Parts as sharded tensors again, placed as the object's own are."""
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
