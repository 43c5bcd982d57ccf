"""The elements of each tensor on each rank, and their transfer to rank 0 and back.

Nothing here depends on the placement of a tensor: each rank numbers the elements of its local part, and the DTensor
itself assembles the numbers. So FSDP2 (also with uneven and empty shards), tensor parallel, both combined, replicated
and plain tensors are handled alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ftopt.step.tensors.digest import block_sums
from ftopt.step.tensors.flat import local
from ftopt.sync.group import Island

_TAG = 40
"""Bits of an element's number, below those of its rank. No rank's tensor has 2^40 elements."""


@dataclass(frozen=True)
class Box:
    """The elements of a rank's local part within the whole tensor: slices, or numbers if they do not form a box."""

    starts: tuple[int, ...]
    shape: tuple[int, ...]
    numbers: Tensor | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(torch.Size(self.shape).numel()) if self.numbers is None else self.numbers.numel()

    def read(self, whole: Tensor) -> Tensor:
        """These elements of ``whole``, flat and contiguous."""
        if self.numbers is not None:
            return whole.reshape(-1)[self.numbers]
        return whole[self._slices()].reshape(-1)

    def write(self, whole: Tensor, flat: Tensor) -> None:
        """Writes these elements, in the form of `read`'s result."""
        if self.numbers is not None:
            whole.view(-1)[self.numbers] = flat
        else:
            whole[self._slices()].copy_(flat.view(self.shape))

    def same(self, other: Box) -> bool:
        """Whether both are the same elements in the same order."""
        if (self.numbers is None) != (other.numbers is None) or (self.starts, self.shape) != (
            other.starts,
            other.shape,
        ):
            return False
        return self.numbers is None or other.numbers is None or torch.equal(self.numbers, other.numbers)

    def _slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + n) for start, n in zip(self.starts, self.shape, strict=True))


def box_of(tensor: Tensor) -> Box:
    """Where this rank's part of ``tensor`` lies. Collective over its mesh."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box((0,) * len(shape), shape)
    part, rank = local(tensor), torch.distributed.get_rank()
    numbered = torch.arange(part.numel(), dtype=torch.int64).view(part.shape)
    whole = _assembled(numbered + (rank << _TAG), tensor).reshape(-1)
    places = torch.nonzero(whole >> _TAG == rank).view(-1)
    numbers = torch.empty_like(places)
    numbers[whole[places] - (rank << _TAG)] = places
    return _as_box(numbers, shape, tuple(part.shape))


def _assembled(part: Tensor, like: DTensor) -> Tensor:
    """The whole tensor, on the CPU, of which each rank has its ``part``. Collective over the mesh of ``like``."""
    mesh = like.device_mesh
    divided = DTensor.from_local(
        part.to(mesh.device_type), mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return divided.full_tensor().cpu()


def whole_tensors(tensors: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """A state dict with whole tensors in place of DTensors, which are gathered one at a time. Collective.

    Args:
        keep: False: returns an empty dict, on ranks that only give their parts.
    """
    found = {}
    for name, value in tensors.items():
        whole = _assembled(local(value), value) if isinstance(value, DTensor) else value
        if keep:
            found[name] = whole
    return found


def _as_box(numbers: Tensor, whole: tuple[int, ...], part: tuple[int, ...]) -> Box:
    """The elements as slices if they form a box."""
    if not numbers.numel() or len(part) != len(whole):
        return Box((0,) * len(part), part) if not numbers.numel() else Box((), part, numbers)
    first, starts = int(numbers[0]), list[int]()
    for size in reversed(whole):
        first, start = divmod(first, size)
        starts.insert(0, start)
    box = Box(tuple(starts), part)
    fits = all(start + n <= size for start, n, size in zip(starts, part, whole, strict=True))
    if fits and torch.equal(box.read(torch.arange(int(torch.Size(whole).numel())).view(whole)), numbers):
        return box
    return Box((), part, numbers)


class Parts:
    """The parts of a model's tensors on all ranks of an island.

    Args:
        tensors: this rank's tensors, by name; the same names on all ranks. Collective.

    Attributes:
        names: names of the tensors, in order.
    """

    def __init__(self, island: Island, tensors: Mapping[str, Tensor]) -> None:
        self._island, self.names = island, list(tensors)
        mine = {name: box_of(tensor) for name, tensor in tensors.items()}
        boxes = island.gather(mine)
        first = [{name: _first(boxes, name, rank) for name in self.names} for rank in range(len(boxes))]
        self.boxes: list[dict[str, Box]] = boxes  # those of all ranks, on rank 0
        self._first: list[dict[str, int]] = island.share(first)
        self._mine = mine

    @torch.no_grad()
    def pull(
        self, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor], there: Sequence[Collection[str]] | None = None
    ) -> list[str]:
        """Gathers the parts of all ranks in rank 0's ``into``, whole tensors on the CPU. Collective.

        Args:
            tensors: this rank's tensors; tensors missing on all ranks are left out.
            into: on rank 0, the whole tensors of all names that a rank has. Elements that no rank has do not change.
            there: for each rank, the names that it has. Default: all ranks have the same names.

        Returns:
            On rank 0, names of tensors that are replicated in the island but differ.
        """
        island = self._island
        if there is None:
            there = [tensors] * island.size
        if not island.leads:
            mine = self._owned(island.rank, there)
            for dtype, names in _by_dtype(tensors, mine):
                island.send(_joined([local(tensors[name]) for name in names], dtype), 0)
            copies = [name for name in self.names if name in tensors and name not in mine]
            island.gather({name: _sums(local(tensors[name])) for name in copies})
            return []
        for name, box in self._mine.items():
            if name in tensors:
                box.write(into[name], local(tensors[name]).reshape(-1).to("cpu"))
        for rank in range(1, island.size):
            for dtype, names in _by_dtype(into, self._owned(rank, there)):
                sizes = [self.boxes[rank][name].numel for name in names]
                buffer = torch.empty(sum(sizes), dtype=dtype)
                island.receive(buffer, rank)
                for name, part in zip(names, torch.split(buffer, sizes), strict=True):
                    self.boxes[rank][name].write(into[name], part)
        unlike = dict[str, None]()
        for rank, sums in enumerate(island.gather({})[1:], 1):
            for name, found in sums.items():
                if found != _sums(self.boxes[rank][name].read(into[name])):
                    unlike[name] = None
        return list(unlike)

    @torch.no_grad()
    def push(
        self, tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor], there: Sequence[Collection[str]] | None = None
    ) -> None:
        """The reverse: gives each rank its part of rank 0's ``whole`` tensors. ``there``: as in `pull`. Collective."""
        island = self._island
        if there is None:
            there = [tensors] * island.size
        if not island.leads:
            for dtype, names in _by_dtype(tensors, self._had(island.rank, there)):
                parts = [local(tensors[name]) for name in names]
                buffer = torch.empty(sum(part.numel() for part in parts), dtype=dtype)
                island.receive(buffer, 0)
                for part, flat in zip(parts, torch.split(buffer, [part.numel() for part in parts]), strict=True):
                    part.copy_(flat.view(part.shape))
            return
        for rank in range(1, island.size):
            for dtype, names in _by_dtype(whole, self._had(rank, there)):
                island.send(_joined([self.boxes[rank][name].read(whole[name]) for name in names], dtype), rank)
        for name in self._had(0, there):
            part = local(tensors[name])
            part.copy_(self._mine[name].read(whole[name]).view(part.shape))

    def first(self, rank: int, name: str) -> int:
        """The first rank that has the same part of a tensor as ``rank``."""
        return self._first[rank][name]

    def another_has(self, name: str, rank: int, ranks: Collection[int]) -> bool:
        """Whether one of ``ranks`` has the same part of ``name`` as ``rank``, or that part is empty. On rank 0."""
        first = self._first[rank][name]
        return not self.boxes[rank][name].numel or any(self._first[r][name] == first for r in ranks)

    def _had(self, rank: int, there: Sequence[Collection[str]]) -> list[str]:
        return [name for name in self.names if name in there[rank]]

    def _owned(self, rank: int, there: Sequence[Collection[str]]) -> list[str]:
        """Names of tensors whose part on this rank is not also on an earlier rank."""
        return [
            name
            for name in self._had(rank, there)
            if (first := self._first[rank][name]) == rank
            or not any(name in there[r] and self._first[r][name] == first for r in range(first, rank))
        ]


def _first(boxes: Sequence[Mapping[str, Box]], name: str, rank: int) -> int:
    """The first rank that has the same part of a tensor as ``rank``."""
    return next(r for r in range(rank + 1) if boxes[r][name].same(boxes[rank][name]))


def _by_dtype(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[tuple[torch.dtype, list[str]]]:
    there = sorted((name for name in names if name in tensors), key=lambda name: str(tensors[name].dtype))
    return [(dtype, list(run)) for dtype, run in groupby(there, key=lambda name: tensors[name].dtype)]


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.reshape(-1).to("cpu") for part in parts]) if parts else torch.empty(0, dtype=dtype)


def _sums(part: Tensor) -> bytes:
    """A digest of a part: equal for equal bits."""
    flat = part.reshape(-1).to("cpu").contiguous()
    return bytes(block_sums(flat).numpy().tobytes()) if flat.numel() else b""
