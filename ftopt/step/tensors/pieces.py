"""Elementwise work on flat tensors, piece by piece, so that all operations on a piece find it in the cache.

Ten operations over 50 million elements are ten sweeps through memory; in pieces they are one. Elementwise arithmetic
gives the same bits either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ftopt.methods import Method, ReplicaView, Round, own_code
from ftopt.step.tensors.digest import BLOCK_BYTES, block_sums, blocks_of, largest
from ftopt.step.tensors.fused import LANES, OUTER_STEPS, ROW, Fused, displaced, fits, fused
from ftopt.step.tensors.mapped import behind, let_go
from ftopt.step.tensors.memory import Memory

Parts = Iterable[tuple[Tensor, slice]]
"""Parameters in parts of any shape and dtype, each with its place in a flat tensor."""

_SMALL, _LARGE = 2.0**-56, 2.0**60
"""Between these largest elements fp32 holds the squares of a piece."""

_FEW = 1 << 15
"""Elements below which torch's fp64 norm takes less time than a dozen calls."""

_ON_CPU, _ELSEWHERE = 1 << 18, 1 << 24
"""Elements of a piece, a multiple of the digest's blocks: on a CPU half a dozen pieces fit into the cache, and calls
cost a tenth of the time."""
_AT_ONCE = 4
"""Pieces that a kernel steps in one call: it goes through them once, and a call costs a fifth of a piece."""


def piece_of(flat: Tensor) -> int:
    """The number of elements in a piece of the tensor."""
    return _ON_CPU if flat.device.type == "cpu" else _ELSEWHERE


class Measured:
    """The L2 norm and the largest absolute element of all pieces seen, and whether they were finite.

    On a CPU squares are added in a fixed order, with and without kernels: in fp32 those of elements 512, 256, 128 and
    64 apart within `ROW` elements; the `LANES` sums of a row in fp64, over all pieces. Pieces of few elements, and
    those whose squares fp32 may not hold, are left to torch, in fp64. On a CUDA device the numbers stay there, in
    fp64, until they are read, which waits for the device.
    """

    def __init__(self) -> None:
        self._squares = self._peak = self._behind = 0.0
        self._finite = True
        self._there: list[tuple[Tensor, bool]] = []
        self._lanes: Tensor | None = None

    def see(self, piece: Tensor, *, behind: bool = False) -> None:
        """Measures one more piece. ``behind``: it is not a part of the parameters (buffers, averaged inner state)."""
        if not piece.numel():
            return
        if piece.is_cuda:
            low, high = torch.aminmax(piece)
            norm = torch.linalg.vector_norm(piece, dtype=torch.float64)
            self._there.append((torch.stack([norm, torch.maximum(-low, high).double()]), behind))
            return
        peak = largest(piece)
        self._take(peak, behind)
        if not behind and piece.numel() >= _FEW and _SMALL < peak < _LARGE:
            for part in torch.split(piece.view(-1), _ON_CPU):
                self._add_squares(part)
        elif not behind:
            self._take_squares(piece, peak)

    def see_difference(self, a: Tensor, b: Tensor, out: Tensor | None = None, factor: float | None = None) -> None:
        """``out <- factor * (a - b)``, unless ``out`` is None; measures ``a - b`` as one more piece of the parameters.
        ``a`` and ``out`` are fp32."""
        found = OUTER_STEPS.ready() if _FEW <= a.numel() <= _ON_CPU else None
        now = b if found is None else b.float()
        if found is None or not fits(a, now, a if out is None else out):
            apart = torch.sub(a, now, out=out)
            self.see(apart)
            if factor is not None:
                apart.mul_(factor)
            return
        peak = displaced(found, a, now, out, 1.0 if factor is None else factor, self._sums())
        self._take(peak)
        if not _SMALL < peak < _LARGE:
            self._take_squares(torch.sub(a, now), peak)

    def _take(self, peak: float, behind: bool = False) -> None:
        if not math.isfinite(peak):
            self._finite = False
        elif behind:
            self._behind = max(self._behind, peak)
        else:
            self._peak = max(self._peak, peak)

    def _take_squares(self, piece: Tensor, peak: float) -> None:
        if peak and math.isfinite(peak):
            norm = float(torch.linalg.vector_norm(piece, dtype=torch.float64))
            self._squares += norm * norm

    def _add_squares(self, piece: Tensor) -> None:
        rows = -(-piece.numel() // ROW)
        squares = piece.new_empty(rows * ROW)
        torch.mul(piece, piece, out=squares[: piece.numel()])
        squares[piece.numel() :] = 0
        sums, width = squares.view(rows, ROW), ROW
        while width > LANES:
            width //= 2
            sums = sums[:, :width].add_(sums[:, width:])
        self._sums()[: rows * LANES].view(rows, LANES).add_(sums.cpu())

    def _sums(self) -> Tensor:
        if self._lanes is None:
            self._lanes = torch.zeros(_ON_CPU // ROW * LANES, dtype=torch.float64)
        return self._lanes

    @property
    def norm(self) -> float:
        """The L2 norm of the parameters."""
        return math.sqrt(self.numbers()[0])

    @property
    def peak(self) -> float:
        """The largest absolute element of the parameters."""
        self._look()
        return self._peak

    @property
    def behind(self) -> float:
        """The largest absolute element outside the parameters."""
        self._look()
        return self._behind

    @property
    def finite(self) -> bool:
        """Whether all pieces were finite."""
        self._look()
        return self._finite

    def numbers(self) -> tuple[float, float, float, bool]:
        """All measurements, for `joined`."""
        self._look()
        sums = self._lanes if self._lanes is not None else torch.zeros(1)
        while len(sums) > 1:
            sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
        return self._squares + float(sums), self._peak, self._behind, self._finite

    @staticmethod
    def joined(several: Sequence[tuple[float, float, float, bool]]) -> Measured:
        """The measurements of one tensor, from those of its slices in order."""
        found = Measured()
        for squares, peak, peak_behind, finite in several:
            found._squares += squares
            found._peak, found._behind = max(found._peak, peak), max(found._behind, peak_behind)
            found._finite = found._finite and finite
        return found

    def _look(self) -> None:
        if self._there:
            there, self._there = self._there, []
            for (norm, peak), (_, behind) in zip(torch.stack([t for t, _ in there]).tolist(), there, strict=True):
                self._take(peak, behind)
                self._squares += norm * norm if math.isfinite(peak) and not behind else 0.0


def blocks_measured(flat: Tensor) -> list[tuple[float, float]]:
    """The L2 norm and the largest absolute element of each of the digest's blocks of a flat fp32 tensor, 0 for a block
    that is not finite. The bits do not depend on how the tensor is cut into slices of whole blocks. In fp64: devices
    and processors differ by some 1e-16 of a norm."""
    found, block = list[tuple[float, float]](), BLOCK_BYTES // flat.element_size()
    for piece in torch.split(flat, piece_of(flat)):
        whole = piece.numel() // block * block
        for rows in (piece[:whole].view(whole // block, block), piece[whole:].unsqueeze(0)):
            if not rows.numel():
                continue
            low, high = torch.aminmax(rows, dim=1)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            for norm, peak in torch.stack([norms, torch.maximum(-low, high).double()], dim=1).tolist():
                found.append((norm, peak) if math.isfinite(peak) else (0.0, 0.0))
        let_go(piece)
    return found


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite. A finite sum proves it in the cheapest possible sweep."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def gathered(parts: Parts) -> Iterator[tuple[Tensor, slice]]:
    """``parts``, flat, with those of few elements joined, in copies: a call of torch costs more than their elements."""
    few, first = list[Tensor](), 0
    for part, where in parts:
        if few and (part.numel() >= _FEW or where.stop - first > _ON_CPU):
            yield torch.cat(few), slice(first, where.start)
            few.clear()
        if part.numel() >= _FEW:
            yield part.reshape(-1), where
            continue
        first = first if few else where.start
        few.append(part.reshape(-1))
    if few:
        yield torch.cat(few), slice(first, where.stop)


def copy(parts: Parts, start: Tensor, out: Tensor, trained: int, until: int) -> Measured:
    """``out <- params``; measures the first ``until`` elements of ``start - params``. Elements after ``trained`` are
    not parameters."""
    measured = Measured()
    for part, where in behind(gathered(parts), start):
        kept = out[where].copy_(part)
        if where.stop <= trained:
            measured.see_difference(start[where], kept)
            continue
        moved, ours = start[where] - kept, max(0, trained - where.start)
        measured.see(moved[:ours])
        measured.see(moved[ours : max(0, until - where.start)], behind=True)
    return measured


def payload(
    method: Method, view: ReplicaView, parts: Parts, out: Tensor, share: float | None, measured: Measured | None = None
) -> None:
    """``out <- share * payload``, for an elementwise method; ``share`` None: the payload. Measures ``start - params``,
    if asked to. The parameters are ``parts``, not ``view.params``."""
    displaces = type(method).payload is Method.payload
    alike = view.start is view.anchor
    for part, where in behind(gathered(parts), view.anchor, view.start):
        anchor, place = view.anchor[where], out[where]
        start = anchor if alike else view.start[where]
        if displaces and measured is not None:
            measured.see_difference(start, part, place, share)
            continue
        if measured is not None:
            measured.see_difference(start, part)
        own_code.payload(method, replace(view, anchor=anchor, start=start, params=part.float()), place)
        if share is not None:
            place.mul_(share)


class Steps:
    """`Method.outer_step` of an elementwise method, piece by piece, in the order in which the mean arrives.

    Args:
        anchor: the present anchor.
        state: the present outer state, the method's own.
        mean: flat fp32; becomes the next anchor unless ``memory`` moves that.
        memory: memory for the next state.
        look: called with each piece of the anchor and of the mean before its step, and where it begins.
    """

    def __init__(
        self,
        method: Method,
        anchor: Tensor,
        state: Mapping[str, Tensor],
        mean: Tensor,
        round: Round,
        memory: Memory,
        look: Callable[[Tensor, Tensor, int], object] | None = None,
    ) -> None:
        self._method, self._anchor, self._mean, self._round, self._memory = method, anchor, mean, round, memory
        self._look = look
        self._scalars = {name: tensor for name, tensor in state.items() if not tensor.dim()}
        self._flats = {name: tensor for name, tensor in state.items() if tensor.dim()}
        self._made, self._of_anchor, self._of_state = dict[str, Tensor](), _room(mean), dict[str, Tensor]()
        found = OUTER_STEPS.ready()
        self._fused = fused(found, method, anchor, state, mean, round) if found is not None else None
        self._size = piece_of(mean) * (_AT_ONCE if self._fused is not None and look is None else 1)
        # For each piece the number of missing elements; 0: its step is done.
        self._missing = [piece.numel() for piece in torch.split(mean, self._size)]
        self._made_anchor = memory.target(mean)
        self._moved, self._finite = 0.0, True
        self._scratch = mean.new_empty(min(self._size, mean.numel()) if self._fused is None else 0)

    def there(self, start: int, stop: int) -> None:
        """Notes that these elements of the mean have arrived; steps the complete pieces."""
        for number in range(start // self._size, -(-stop // self._size)):
            first = number * self._size
            self._missing[number] -= min(stop, first + self._size) - max(start, first)
            if not self._missing[number]:
                self._step(number)

    def waiting(self) -> Tensor:
        """The mean from the last piece without a step to the end."""
        last = max((number for number, missing in enumerate(self._missing) if missing), default=len(self._missing))
        return self._mean[last * self._size :]

    def finish(self) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, dict[str, Tensor]]]:
        """Steps the rest. Returns the anchor, in the memory of the mean or of committed states; the state, in its own
        memory; and the `block_sums` of both, computed while they are in the cache."""
        for number, missing in enumerate(self._missing):
            if missing or not self._mean.numel():  # for an empty slice only the names
                self._missing[number] = 0
                self._step(number)
        return self._made_anchor, self._made, (self._of_anchor, self._of_state)

    @property
    def moved(self) -> float:
        """The largest change of an element of the anchor; inf if the next state is not finite."""
        return self._moved if self._finite else math.inf

    @torch.no_grad()
    def _step(self, number: int) -> None:
        start = number * self._size
        where = slice(start, min(start + self._size, self._mean.numel()))
        place, block = self._mean[where], BLOCK_BYTES // self._mean.element_size()
        sums = slice(start // block, -(-where.stop // block))
        if self._look is not None:
            self._look(self._anchor[where], place, start)
        if self._fused is not None:
            self._by_kernel(self._fused, where, sums)
        else:
            self._by_torch(where, sums)
        let_go(self._anchor[where], self._made_anchor[where], *(flat[where] for flat in self._flats.values()))
        for name in self._of_state:
            let_go(self._made[name][where])

    def _by_kernel(self, fused: Fused, where: slice, sums: slice) -> None:
        place, made_anchor = self._mean[where], self._made_anchor[where]
        old, new = [self._flats[name][where] for name in fused.names], [self._make(name)[where] for name in fused.names]
        of_new = [self._of_state[name][sums] for name in fused.names]
        moved, finite = fused.step(self._anchor[where], place, old, new, [self._of_anchor[sums], *of_new])
        self._moved, self._finite = max(self._moved, moved), self._finite and finite
        self._made.update(fused.scalars)
        if made_anchor.data_ptr() != place.data_ptr():
            made_anchor.copy_(place)

    def _by_torch(self, where: slice, sums: slice) -> None:
        place = self._mean[where]
        own = {name: flat[where] for name, flat in self._flats.items()} | self._scalars
        new_anchor, new = own_code.outer_step(self._method, self._anchor[where], own, place, self._round)
        change = torch.sub(new_anchor, self._anchor[where], out=self._scratch[: place.numel()])
        self._moved = max(self._moved, largest(change))
        place = self._made_anchor[where]
        if new_anchor.data_ptr() != place.data_ptr():
            place.copy_(new_anchor)
        block_sums(place, self._of_anchor[sums])
        for name, tensor in new.items():
            if not tensor.dim():
                self._made[name] = tensor
                continue
            self._finite = self._finite and is_finite(tensor)
            block_sums(self._make(name)[where].copy_(tensor), self._of_state[name][sums])

    def _make(self, name: str) -> Tensor:
        """The memory of a tensor of the next state."""
        if name not in self._made:
            self._made[name] = self._memory.take(self._mean.numel(), self._mean.device)
            self._of_state[name] = _room(self._mean)
        return self._made[name]


def _room(flat: Tensor) -> Tensor:
    """Memory for a tensor's `block_sums`, allocated at once: small blocks between the temporaries of pieces would leave
    holes too small for the next ones."""
    return torch.empty(blocks_of(flat), dtype=torch.int64)
