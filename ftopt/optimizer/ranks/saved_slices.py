"""An island's part of a checkpoint: whole tensors, as for a replica of one process.

For saving, each rank's slices are joined on rank 0, tensor by tensor, in file-backed memory. For resuming, each rank
takes its slices of a checkpoint's tensors, whatever kind of replica wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftopt.common.tree import Tree
from ftopt.errors import UserError
from ftopt.optimizer.ranks.alike import Failed, reason_of
from ftopt.optimizer.ranks.inner import groups_of
from ftopt.optimizer.ranks.rank_model import RankModel
from ftopt.optimizer.saved.restore import Fallback, Resume
from ftopt.step import inner_state
from ftopt.step.inner import Inner
from ftopt.step.outer.state import is_sliced
from ftopt.step.tensors.flat import uncompiled
from ftopt.step.tensors.mapped import Mapped
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.pool import CopyPool
from ftopt.sync.group import Island, Position

Bounds = Sequence[tuple[int, int]]
"""Start and stop of each rank's slice of a fragment."""


class Whole:
    """Joins slices on rank 0. All ranks make the same calls in order.

    Args:
        take: returns memory for a number of fp32 elements.
    """

    def __init__(self, island: Island, bounds: Sequence[Bounds], take: Callable[[int], Tensor]) -> None:
        self._island, self._bounds, self._take = island, bounds, take

    def of(self, fragment: int, piece: Tensor) -> Tensor:
        """A whole tensor of a fragment, from each rank's ``piece``; on the other ranks the piece itself."""
        island, bounds = self._island, self._bounds[fragment]
        piece = piece.contiguous()
        if bounds[0] == (0, bounds[-1][1]):
            return piece  # rank 0 has all of it
        if not island.leads:
            island.send(piece, 0)
            return piece
        whole = self._take(bounds[-1][1])
        for rank, (start, stop) in enumerate(bounds):
            if rank:
                island.receive(whole[start:stop], rank)
            else:
                whole[start:stop] = piece
        return whole

    def committed(self, fragment: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors of a committed state."""
        return {name: self.of(fragment, t) if is_sliced(name, t) else t for name, t in sorted(tensors.items())}

    def work(self, fragment: int, part: Tree) -> Tree:
        """The captured work of a fragment, besides its committed state, with whole tensors."""
        found: Tree = dict(part)
        found["params"] = self.of(fragment, part["params"])
        found["residuals"] = self._residuals(fragment, part["residuals"])
        if (snapshot := part["snapshot"]) is not None:
            found["snapshot"] = {**snapshot, "params": self.of(fragment, snapshot["params"])}
        known = self._island.gather((direction := part["direction"]) is not None)
        found["direction"] = self.of(fragment, direction) if self._island.share(all(known)) else None
        return found

    def _residuals(self, fragment: int, residuals: Tree) -> Tree:
        """The whole residuals. A rank may lack one that others have, after a counted attempt that failed there
        alone."""
        found = self._island.gather({units: left["own"] is not None for units, left in residuals.items()})
        units = sorted({each for here in found for each in here})
        known = self._island.share([(each, any(here.get(each) for here in found)) for each in units])
        nothing = {"own": None, "first": 0, "owed": torch.empty(0)}
        return {each: self._residual(fragment, residuals.get(each, nothing), own=own) for each, own in known}

    def _residual(self, fragment: int, left: Tree, *, own: bool) -> Tree:
        start, stop = self._bounds[fragment][self._island.rank]
        owed = torch.zeros(stop - start)
        owed[left["first"] : left["first"] + left["owed"].numel()] = left["owed"]
        mine = torch.zeros(stop - start) if left["own"] is None else left["own"]
        return {"own": self.of(fragment, mine) if own else None, "first": 0, "owed": self.of(fragment, owed)}


def sliced_tensors(bounds: Bounds, rank: int, tensors: Any) -> dict[str, Tensor]:
    """A rank's slices of a whole committed state."""
    start, stop = bounds[rank]
    return {name: t[start:stop].clone() if is_sliced(name, t) else t for name, t in tensors.items()}


def sliced_work(bounds: Bounds, rank: int, part: Tree | None) -> Tree | None:
    """A rank's slices of the result of `Whole.work`."""
    if part is None or part["params"] is None:
        return part
    start, stop = bounds[rank]
    found: Tree = {**part, "params": part["params"][start:stop].clone()}
    found["residuals"] = {units: _sliced_residual(left, start, stop) for units, left in part["residuals"].items()}
    if (snapshot := part.get("snapshot")) is not None:
        found["snapshot"] = {**snapshot, "params": snapshot["params"][start:stop].clone()}
    if (direction := part.get("direction")) is not None:
        found["direction"] = direction[start:stop].clone()
    return found


def _sliced_residual(left: Tree, start: int, stop: int) -> Tree:
    first, owed = left["first"], left["owed"]
    low, high = max(start, first), min(stop, first + owed.numel())
    return {
        "own": None if left["own"] is None else left["own"][start:stop].clone(),
        "first": max(0, low - start),
        "owed": owed[low - first : max(low, high) - first].clone() if low < high else owed.new_empty(0),
    }


def sliced_resume(each: Sequence[Bounds], rank: int, resume: Any) -> Any:
    """A rank's `Resume`: its slices, without the inner state, which all ranks restore together. ``each``: bounds of
    each fragment."""

    def version(bounds: Bounds, saved: Any) -> Any:
        return replace(saved, tensors=sliced_tensors(bounds, rank, saved.tensors))

    def replica(saved: Any) -> Any:
        if len(saved.committed) != len(each):
            return saved  # refused later
        works = [sliced_work(bounds, rank, part) for bounds, part in zip(each, saved.own["fragments"], strict=True)]
        committed = tuple(version(bounds, one) for bounds, one in zip(each, saved.committed, strict=True))
        model = saved.own["model"]  # for a method for which rank 0 has the whole model
        model = model if model is None or not rank else model[:0]
        return replace(saved, committed=committed, own={**saved.own, "fragments": works, "inner": None, "model": model})

    newest = resume.newest
    if len(newest) == len(each):
        newest = tuple(version(bounds, one) for bounds, one in zip(each, newest, strict=True))
    return replace(resume, saved=replica(resume.saved), adopted=tuple(map(replica, resume.adopted)), newest=newest)


def beside_checkpoints(folder: Path) -> Memory:
    """Memory for whole tensors until a checkpoint is written: in files, or in RAM if the folder cannot be written;
    writing the checkpoint then fails, which is logged, and training goes on."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Mapped(folder)
    except (OSError, UserError):
        return Memory()


class SlicedFallback:
    """A `Fallback` for one rank, which agrees with the others on the checkpoint to resume from.

    Args:
        sliced: returns a rank's slices of a `Resume`.
        agree: raises the same error on all ranks unless their values are equal.
    """

    def __init__(self, fallback: Fallback, sliced: Callable[[Resume], Resume], agree: Callable[[object], None]) -> None:
        self._fallback, self._sliced, self._agree = fallback, sliced, agree

    def newest(self) -> Position | None:
        return self._fallback.newest()

    def go_on(self, incarnation: int) -> Resume:
        try:
            found = self._fallback.go_on(incarnation)
        except Exception as error:
            self._agree(Failed(reason_of(error), isinstance(error, UserError)))
            raise
        self._agree(versions_of(found))
        return self._sliced(found)


def versions_of(resume: Resume | None) -> object:
    """A checkpoint's versions, for comparison; None: there is no checkpoint."""
    return None if resume is None else [(version.record.version, version.digest) for version in resume.newest]


def inner_tree(inner: Inner, parts: RankModel, memory: Memory) -> list[Tree]:
    """Like `inner_state.capture`, for all ranks; on rank 0."""

    def zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        words = -(-shape.numel() * dtype.itemsize // 4)
        return memory.take(words, torch.device("cpu")).view(dtype)[: shape.numel()].view(shape).zero_()

    state, unlike = parts.states.pull(zeros)
    parts.warn_unlike(unlike)
    named = {id(p): uncompiled(name) for name, p in parts.trained.items()}
    return [
        {
            "class": type(optimizer).__name__,
            "groups": groups,
            "beside": inner_state.beside_of(optimizer, CopyPool()),
            "state": {
                named[id(p)]: dict(state[named[id(p)]])
                for group in optimizer.param_groups
                for p in group["params"]
                if id(p) in named and state.get(named[id(p)])
            },
        }
        for optimizer, groups in zip(inner.optimizers, groups_of(inner), strict=True)
    ]
