"""Gathers the inner states of all ranks of an island by name and key, and distributes them.

A rank may lack states of others: of an empty shard, of a parameter without a gradient there, or of one that another
rank updates and broadcasts (distributed Muon). So the ranks first exchange lists of their states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.ranks.parts import Parts
from ftopt.step.inner import device_of
from ftopt.step.tensors.flat import some
from ftopt.sync.group import Island

_log = logging.getLogger(__name__)

States = Mapping[str, Mapping[str, Any]]
"""Parameter's name -> key -> value."""
Owners = Mapping[str, tuple[Tensor, Optimizer, Mapping[str, Any]]]
"""Parameter's name -> the parameter, its inner optimizer, its group."""
Zeros = Callable[[torch.Size, torch.dtype], Tensor]
_Entry = tuple[str, str]


@dataclass(frozen=True)
class _Kind:
    """The kind of a rank's value under a key. ``dtype``: that of a value sharded like its parameter; None: a number or
    similar. ``stale``: unchanged since rank 0 gave it."""

    dtype: torch.dtype | None
    stale: bool = False


@dataclass(frozen=True)
class _Plan:
    """Rank 0's plan of the values to gather, known to all ranks.

    Attributes:
        spread: key -> name -> dtype, of values sharded like their parameter.
        there: key -> for each rank, the names that it has.
        plain: for each rank, the other values that it gives.
        lacks: for each rank, the values that it lacks and does not get, since another rank has the same part.
    """

    spread: dict[str, dict[str, torch.dtype]]
    there: dict[str, list[list[str]]]
    plain: list[list[_Entry]]
    lacks: list[set[_Entry]]


@dataclass(frozen=True)
class _Value:
    """A value from rank 0: its dtype if it is sharded like its parameter, or the value itself."""

    dtype: torch.dtype | None
    plain: Any = None


class InnerStates:
    """This rank's inner state, and the exchange with rank 0. All ranks make the same calls.

    Args:
        owners: all trained parameters.
        replica: the island's id, for messages.
    """

    def __init__(self, island: Island, parts: Parts, owners: Owners, replica: str) -> None:
        self._island, self._parts, self._owners, self._replica = island, parts, owners, replica
        self._lacks: list[set[_Entry]] = [set() for _ in range(island.size)]
        self._given: dict[_Entry, object] = {}
        self._warned_partly = False

    def pull(self, zeros: Zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype)) -> tuple[States, list[str]]:
        """Gathers all inner state. Collective. ``zeros``: returns memory for whole tensors.

        Returns:
            On rank 0, whole tensors and other values; and names of replicated tensors that differ.
        """
        island = self._island
        found = island.gather(self._kinds())
        plan = island.share(self._agree(found) if island.leads else None)
        if isinstance(plan, UserError):
            raise plan
        self._lacks = plan.lacks
        mine = {(name, key): value for name, key, value in self._values()}
        state: dict[str, dict[str, Any]] = {name: {} for name in self._owners}
        for (name, key), value in self._plain(plan, mine).items():
            state[name][key] = value
        unlike = dict[str, None]()
        for key, dtypes in plan.spread.items():
            there = plan.there[key]
            tensors = {name: mine[name, key] for name in there[island.rank]}
            whole = {}
            if island.leads:
                whole = {name: zeros(self._owners[name][0].shape, dtype) for name, dtype in dtypes.items()}
            unlike |= dict.fromkeys(self._parts.pull(tensors, whole, there))
            for name, tensor in whole.items():
                state[name][key] = tensor
        return state, list(unlike)

    def push(self, state: States) -> None:
        """The reverse: each rank gets its part of rank 0's ``state``, but for what it lacks. Collective."""
        described: dict[_Entry, _Value] = self._island.share(
            {
                (name, key): _described(value, self._owners[name][0])
                for name, values in state.items()
                for key, value in values.items()
            }
        )
        lacks, rank = self._lacks, self._island.rank
        for name, (parameter, optimizer, group) in self._owners.items():
            before = optimizer.state.pop(parameter, {})
            made = {
                key: _made(value, key, before.get(key), parameter, group)
                for (owner, key), value in described.items()
                if owner == name and (name, key) not in lacks[rank]
            }
            made |= {key: value for key, value in before.items() if value is None or (name, key) in lacks[rank]}
            if made:
                optimizer.state[parameter] = made
        for key in dict.fromkeys(key for (_, key), value in described.items() if value.dtype is not None):
            names = [name for (name, each), value in described.items() if each == key and value.dtype is not None]
            there = [[name for name in names if (name, key) not in lack] for lack in lacks]
            tensors = {name: self._state_of(name)[key] for name in there[rank]}
            self._parts.push(tensors, {name: state[name][key] for name in names} if state else {}, there)
        self._given = {(name, key): _mark(value) for name, key, value in self._values() if (name, key) in described}

    def _state_of(self, name: str) -> Mapping[str, Any]:
        parameter, optimizer, _ = self._owners[name]
        found: Mapping[str, Any] = optimizer.state.get(parameter, {})
        return found

    def _values(self) -> Iterator[tuple[str, str, Any]]:
        for name in self._owners:
            for key, value in self._state_of(name).items():
                if value is not None:
                    yield name, key, value

    def _kinds(self) -> dict[_Entry, _Kind | tuple[int, ...]]:
        """The kinds of this rank's values; a shape marks a value that cannot be gathered."""
        found = dict[_Entry, _Kind | tuple[int, ...]]()
        for name, key, value in self._values():
            parameter = self._owners[name][0]
            stale = (name, key) in self._given and _same_mark(self._given[name, key], _mark(value))
            if not isinstance(value, Tensor):
                found[name, key] = _Kind(None, stale)
            elif _lies_like(value, parameter):
                found[name, key] = _Kind(value.dtype, stale)
            elif isinstance(value, DTensor) or (value.numel() != 1 and isinstance(parameter, DTensor)):
                found[name, key] = tuple(value.shape)
            else:
                found[name, key] = _Kind(None, stale)
        return found

    def _agree(self, found: Sequence[Mapping[_Entry, _Kind | tuple[int, ...]]]) -> _Plan | UserError:
        """Rank 0: plans which values come from which ranks."""
        kinds: dict[_Entry, _Kind] = {}
        for rank, each in enumerate(found):
            for entry, kind in each.items():
                if not isinstance(kind, _Kind):
                    return _refused(entry, kind)
                if kinds.setdefault(entry, kind).dtype != kind.dtype:
                    return _unlike(entry, kinds[entry], kind, rank)
        plan = _Plan({}, {}, [[] for _ in found], [set() for _ in found])
        partly = dict[str, None]()
        for (name, key), kind in kinds.items():
            entry = name, key
            has = [rank for rank, each in enumerate(found) if entry in each]
            fresh = [rank for rank in has if not found[rank][entry].stale]  # type: ignore[union-attr]
            # A rank that did not get the value last time, and has not changed its own, has an old one.
            has = [rank for rank in has if rank in fresh or entry not in self._lacks[rank]] or has
            if kind.dtype is None:
                plan.plain[(fresh or has)[0]].append(entry)
            else:
                plan.spread.setdefault(key, {})[name] = kind.dtype
                there = plan.there.setdefault(key, [[] for _ in found])
                for rank in self._used(name, has, fresh):
                    there[rank].append(name)
                has = [rank for rank in has if name in there[rank]]
            for rank in range(len(found)):
                if rank in has:
                    continue
                if self._parts.another_has(name, rank, has):
                    plan.lacks[rank].add(entry)
                elif kind.dtype is not None:
                    partly[name] = None
        self._warn_partly(list(partly))
        return plan

    def _used(self, name: str, has: Sequence[int], fresh: Sequence[int]) -> list[int]:
        """The ranks whose values count: a rank that has changed its values comes before one that has not."""
        return [rank for rank in has if rank in fresh or not self._parts.another_has(name, rank, fresh)]

    def _plain(self, plan: _Plan, mine: Mapping[_Entry, Any]) -> dict[_Entry, Any]:
        """Values that are not sharded like their parameter, on rank 0: from the first rank that has them."""
        rank = self._island.rank
        given = {entry: mine[entry] for entry in plan.plain[rank]}
        given = {entry: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for entry, v in given.items()}
        if not any(plan.plain[1:]):
            return given
        found = self._island.gather(given)
        return {entry: value for each in found for entry, value in each.items()}

    def _warn_partly(self, names: list[str]) -> None:
        if names and not self._warned_partly:
            self._warned_partly = True
            _log.warning(
                "replica %s: the inner optimizer has a state of some parts of %s, and none of others, which ranks hold "
                "that have given it no gradient; these are taken as zero",
                self._replica,
                some(names),
            )


def _lies_like(value: Tensor, parameter: Tensor) -> bool:
    return value.shape == parameter.shape and bool(value.dim())


def _refused(entry: _Entry, shape: tuple[int, ...]) -> UserError:
    return UserError(
        f"the inner optimizer's state {entry[1]!r} of {entry[0]} is {shape}, which is neither a number nor placed like "
        "its parameter; such a state cannot be brought together from several ranks; use another inner optimizer, or "
        "replicate the parameter (DDP)"
    )


def _unlike(entry: _Entry, first: _Kind, kind: _Kind, rank: int) -> UserError:
    one, other = (each.dtype or "no tensor like its parameter" for each in (first, kind))
    return UserError(
        f"the inner optimizer's state {entry[1]!r} of {entry[0]} is {one} on one rank and {other} on rank {rank}; make "
        "the optimizers alike on all ranks"
    )


def _described(value: Any, parameter: Tensor) -> _Value:
    if isinstance(value, Tensor) and _lies_like(value, parameter):
        return _Value(value.dtype)
    return _Value(None, value.detach().clone() if isinstance(value, Tensor) else value)


def _made(value: _Value, key: str, before: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A value of the inner state on this rank; a tensor sharded like its parameter is filled afterwards."""
    if value.dtype is not None:
        kept = isinstance(before, Tensor) and before.shape == parameter.shape and before.dtype == value.dtype
        return before if kept else torch.zeros_like(parameter, dtype=value.dtype)
    if isinstance(value.plain, Tensor):
        return value.plain.to(device_of(key, value.plain, parameter, group), copy=True)
    return value.plain


def _mark(value: Any) -> object:
    """A mark that changes when the value is written, as far as torch counts writes."""
    if not isinstance(value, Tensor):
        return value
    return object() if value.is_inference() else (id(value), value._version)


def _same_mark(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except Exception:  # an optimizer's own object that cannot be compared
        return False
