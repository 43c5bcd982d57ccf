"""Slices of a model's flat fragments, one per rank, and their exchange with the ranks' own parts of the tensors.

A fragment's flat tensor, as in a replica of one process, is cut into one slice per rank (`Cut`). Only this file depends
on how the model is spread over the ranks (FSDP2, HSDP, tensor parallel, DDP, uneven shards): each part of a tensor goes
directly from the rank that has it to the ranks whose slices contain it (`Exchange`), some tensors at a time. No rank
ever holds the whole model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ftopt.methods import Span
from ftopt.optimizer.ranks.parts import Box
from ftopt.optimizer.ranks.rank_model import RankModel, skeleton
from ftopt.step.tensors.digest import block_sums
from ftopt.step.tensors.flat import FlatView, Together, flat_order, local
from ftopt.sync.group import slices

_AT_ONCE = 1 << 21
"""Elements exchanged at a time per rank."""

Selected = slice | Tensor


@dataclass(frozen=True)
class Cut:
    """A fragment's flat tensor and its slices.

    Args:
        names: names of its tensors, in flat order; ``shapes`` and ``dtypes`` of the whole tensors, ``starts`` in the
            flat tensor.
        bounds: start and stop of each rank's slice.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    starts: list[int]
    bounds: list[tuple[int, int]]

    @staticmethod
    def of(trained: Mapping[str, Tensor], names: Sequence[str], ranks: int, *, whole: bool = False) -> Cut:
        """The cut of the tensors ``names``, sharded or not. ``whole``: rank 0 has all of it."""
        ordered = [name for name, _ in flat_order([(name, trained[name]) for name in trained if name in names])]
        shapes, starts, at = [tuple(trained[name].shape) for name in ordered], list[int](), 0
        for shape in shapes:
            starts.append(at)
            at += torch.Size(shape).numel()
        bounds = [(0, at), *[(at, at)] * (ranks - 1)] if whole else slices(at, ranks)
        return Cut(ordered, shapes, [trained[name].dtype for name in ordered], starts, bounds)

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return self.bounds[-1][1]

    def piece(self, number: int, rank: int) -> tuple[int, int]:
        """The elements of tensor ``number`` in a rank's slice: start and stop, in the tensor."""
        (low, high), start = self.bounds[rank], self.starts[number]
        size = torch.Size(self.shapes[number]).numel()
        return max(0, min(size, low - start)), max(0, min(size, high - start))

    def describe(self) -> str:
        """See `FlatView.describe`."""
        lines = [f"{n} {shape} {dtype}" for n, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True)]
        short = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        return f"{len(self.names)} tensors, {self.numel:,} parameters, {short}"

    def places(self) -> list[tuple[Span, tuple[int, ...], torch.dtype]]:
        """See `FlatView.places`."""
        ends = [*self.starts[1:], self.numel]
        spans = [Span(n, a, b, False) for n, a, b in zip(self.names, self.starts, ends, strict=True)]
        return list(zip(spans, self.shapes, self.dtypes, strict=True))


class SliceView(FlatView):
    """A view of a rank's slice of a fragment: of the flat pieces of its tensors, on the CPU."""

    shared = sliced = True

    def __init__(self, ranks: RankModel, model: nn.Module, cut: Cut, together: Together) -> None:
        super().__init__(model, cut.names)
        self.cut, self._ranks, self.together = cut, ranks, together
        low, high = cut.bounds[ranks.island.rank]
        assert self.numel == high - low and self.names == cut.names, "the slice is not that of the cut"

    def describe(self) -> str:
        return self.cut.describe()

    def in_whole(self) -> list[tuple[Span, tuple[int, ...], torch.dtype]]:
        return self.cut.places()

    def gradient_norm(self) -> float | None:
        """The gradient norm of the whole fragment; all ranks call it."""
        return self._ranks.gradient_norm(self.cut.names, self.together)


class Exchange:
    """This rank's slices of the fragments, and their exchange with parts of the model. All ranks make the same calls.

    Args:
        fragments: names of each fragment's parameters.
        whole: rank 0 has all of each fragment, instead of a slice.

    Attributes:
        model: a module with the model's names, whose parameters are the pieces in this rank's slices: flat, or in the
            model's shapes where they are whole.
    """

    def __init__(self, ranks: RankModel, fragments: Sequence[Sequence[str]], *, whole: bool = False) -> None:
        self._ranks, self._island = ranks, ranks.island
        island, trained = ranks.island, ranks.trained
        self.cuts = [Cut.of(trained, names, island.size, whole=whole) for names in fragments]
        self._boxes: list[dict[str, Box]] = island.share(ranks.parts.boxes if island.leads else None)
        self._runs = [{name: _runs(box, trained[name].shape) for name, box in each.items()} for each in self._boxes]
        self._groups = {
            name: _groups([ranks.parts.first(rank, name) for rank in range(island.size)]) for name in trained
        }
        self._replicated = [name for name, groups in self._groups.items() if any(len(g) > 1 for g in groups.values())]
        pieces = dict[str, nn.Parameter]()
        for cut in self.cuts:
            for number, (name, dtype) in enumerate(zip(cut.names, cut.dtypes, strict=True)):
                start, stop = cut.piece(number, island.rank)
                shape = trained[name].shape if whole and island.leads else (stop - start,)
                pieces[name] = nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.pieces = pieces
        self.model = skeleton(ranks.model, {id(p): pieces[name] for name, p in trained.items()})

    @torch.no_grad()
    def pull(self, fragment: int) -> None:
        """Updates the slices from the model."""
        self._ranks.check_trained()
        cut, me, size = self.cuts[fragment], self._island.rank, self._island.size
        for batch in self._batches(cut):
            sent: list[list[Tensor]] = [[] for _ in range(size)]
            places: list[list[tuple[Tensor, Selected, int]]] = [[] for _ in range(size)]
            for number in batch:
                name = cut.names[number]
                flat = self._flat(name)
                for slice_rank in range(size):
                    low, high = cut.piece(number, slice_rank)
                    for source in self._sources(name, slice_rank) if high > low else ():
                        if me not in (source, slice_rank):
                            continue
                        there, here, count = self._runs[source][name].within(low, high)
                        if me == source and count:
                            sent[slice_rank].append(flat[there])
                        if me == slice_rank and count:
                            places[source].append((self._piece(name), here, count))
            received = self._swap(sent, [[count for *_, count in each] for each in places], cut.dtypes[batch[0]])
            for each, parts in zip(places, received, strict=True):
                for (piece, here, _), part in zip(each, parts, strict=True):
                    piece[here] = part
        self._warn_unlike(cut)

    @torch.no_grad()
    def push(self, fragment: int) -> None:
        """Updates the model from the slices."""
        cut, me, size = self.cuts[fragment], self._island.rank, self._island.size
        for batch in self._batches(cut):
            sent: list[list[Tensor]] = [[] for _ in range(size)]
            places: list[list[tuple[str, Selected, int]]] = [[] for _ in range(size)]
            for number in batch:
                name = cut.names[number]
                for slice_rank in range(size):
                    low, high = cut.piece(number, slice_rank)
                    for holder in range(size) if high > low else ():
                        if me not in (holder, slice_rank):
                            continue
                        there, here, count = self._runs[holder][name].within(low, high)
                        if me == slice_rank and count:
                            sent[holder].append(self._piece(name)[here])
                        if me == holder and count:
                            places[slice_rank].append((name, there, count))
            received = self._swap(sent, [[count for *_, count in each] for each in places], cut.dtypes[batch[0]])
            for each, parts in zip(places, received, strict=True):
                for (name, there, _), part in zip(each, parts, strict=True):
                    _write(local(self._ranks.trained[name]), there, part)
        self._ranks.reshard()

    def _batches(self, cut: Cut) -> Iterator[list[int]]:
        """Groups of tensors of one dtype that are exchanged at a time, by number."""
        batch, held = list[int](), 0
        for number, shape in enumerate(cut.shapes):
            size = torch.Size(shape).numel()
            full = held + size > _AT_ONCE * self._island.size
            if batch and (full or cut.dtypes[batch[0]] != cut.dtypes[number]):
                yield batch
                batch, held = [], 0
            batch.append(number)
            held += size
        if batch:
            yield batch

    def _sources(self, name: str, slice_rank: int) -> Iterator[int]:
        """The ranks from which a slice gets its piece of a tensor. Of ranks with the same part, the slice's own, or one
        chosen by its number, to spread the work."""
        for members in self._groups[name].values():
            yield slice_rank if slice_rank in members else members[slice_rank % len(members)]

    def _piece(self, name: str) -> Tensor:
        return self.pieces[name].detach().view(-1)

    def _flat(self, name: str) -> Tensor:
        return local(self._ranks.trained[name]).reshape(-1).to("cpu")

    def _swap(
        self, sent: Sequence[Sequence[Tensor]], counts: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[tuple[Tensor, ...]]:
        """Exchanges the ranks' data for each other."""
        empty = torch.empty(0, dtype=dtype)
        given = torch.cat([empty, *(part for each in sent for part in each)]).view(torch.uint8)
        item = dtype.itemsize
        sizes, wanted = [item * sum(p.numel() for p in each) for each in sent], [item * sum(each) for each in counts]
        received = torch.empty(sum(wanted), dtype=torch.uint8)
        self._island.exchange(given, sizes, received, wanted)
        return [
            torch.split(part.view(dtype), list(each)) if each else ()
            for part, each in zip(torch.split(received, wanted), counts, strict=True)
        ]

    def _warn_unlike(self, cut: Cut) -> None:
        """Warns of replicated tensors that differ."""
        names = [name for name in cut.names if name in self._replicated]
        if not names:
            return
        found = self._island.gather({name: _sum(self._flat(name)) for name in names})
        unlike = [
            name
            for name in names
            if found and any(len({found[rank][name] for rank in group}) > 1 for group in self._groups[name].values())
        ]
        self._ranks.warn_unlike(unlike)


@dataclass(frozen=True)
class Runs:
    """A part of a tensor as runs of ``length`` elements at ascending ``starts``; or ``numbers``, if the part has a
    different order."""

    starts: Tensor
    length: int
    numbers: Tensor | None = None

    def within(self, low: int, high: int) -> tuple[Selected, Selected, int]:
        """The elements of the part from ``low`` to ``high`` in the whole tensor: their places in the part and relative
        to ``low``, and their number."""
        if self.numbers is not None:
            there = torch.nonzero((self.numbers >= low) & (self.numbers < high)).view(-1)
            return there, self.numbers[there] - low, there.numel()
        first, last = self._before(low), self._before(high)
        if self.starts.numel() == 1:
            shift = int(self.starts[0]) - low
            return slice(first, last), slice(first + shift, last + shift), last - first
        places = torch.arange(first, last)
        here = self.starts[places // self.length] + places % self.length - low if self.length else places
        return slice(first, last), here, last - first

    def _before(self, element: int) -> int:
        """The number of elements of the part before ``element``."""
        runs = int(torch.searchsorted(self.starts, element))
        if not runs:
            return 0
        return (runs - 1) * self.length + min(self.length, element - int(self.starts[runs - 1]))


def _runs(box: Box, shape: Sequence[int]) -> Runs:
    if box.numbers is not None:
        return Runs(box.numbers.new_empty(0), 0, box.numbers)
    if not box.numel:
        return Runs(torch.zeros(1, dtype=torch.int64), 0)
    inner = len(shape)
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    strides = [torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))]
    outer = max(0, inner - 1)
    length = torch.Size(box.shape[outer:]).numel()
    first = sum(start * stride for start, stride in zip(box.starts[outer:], strides[outer:], strict=True))
    starts = torch.tensor([first], dtype=torch.int64)
    for i in reversed(range(outer)):
        steps = (box.starts[i] + torch.arange(box.shape[i], dtype=torch.int64)) * strides[i]
        starts = (steps[:, None] + starts[None, :]).view(-1)
    return Runs(starts, length)


def _groups(first: Sequence[int]) -> dict[int, list[int]]:
    """Ranks with the same part, keyed by the first of them."""
    return {own: [rank for rank, each in enumerate(first) if each == own] for own in dict.fromkeys(first)}


def _write(part: Tensor, where: Selected, values: Tensor) -> None:
    """Writes elements of a part, numbered in its own order."""
    values = values.to(part.device)
    if part.is_contiguous():
        part.view(-1)[where] = values
    else:
        flat = part.reshape(-1).clone()
        flat[where] = values
        part.copy_(flat.view(part.shape))


def _sum(flat: Tensor) -> bytes:
    return hashlib.sha256(block_sums(flat.contiguous()).numpy().tobytes()).digest() if flat.numel() else b""
