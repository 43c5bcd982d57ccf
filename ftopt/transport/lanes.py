"""Lanes: how slices of a payload are reduced between members of several ranks, rank to rank.

A member of several ranks may hold a payload in *slices*, one per rank (`slices`). The ends of all members' slices cut
the payload into *lanes*: in each member, one rank owns all of a lane. So a lane is an ordinary reduction with one
process per member, in their order. Its bits are those of a reduction of the whole, since slices end at block boundaries
of every codec. Members of one process, or of another number of ranks, need no special case: only their slices differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ftopt.codecs.codec import Codec
from ftopt.transport.interface import Carry, Collective, Owed, Summed

T = TypeVar("T")

SLICE_BLOCK = 1 << 14
"""Slices begin at multiples of this number of elements: in fp32, one block of the digest and a multiple of every
codec's block."""


def slices(numel: int, parts: int) -> list[tuple[int, int]]:
    """Start and stop of each of ``parts`` slices of ``numel`` elements: whole blocks, whose numbers differ by 1 at
    most; the first one is never empty."""
    blocks = -(-numel // SLICE_BLOCK)
    ends = [min(numel, -(-blocks * part // parts) * SLICE_BLOCK) for part in range(parts + 1)]
    return list(pairwise(ends))


def lanes_of(numel: int, parts: Sequence[int], rank: int, index: int) -> list[tuple[int, int]]:
    """Start and stop of the lanes in slice ``index`` of member ``rank``, where member m has ``parts[m]`` slices."""
    ends = sorted({end for n in set(parts) for start_stop in slices(numel, n) for end in start_stop})
    low, high = slices(numel, parts[rank])[index]
    return [(start, stop) for start, stop in pairwise(ends) if low <= start and stop <= high]


class Connect(Protocol):
    """Connects the owners of one lane."""

    def __call__(self, key: str, /) -> Collective: ...


class Lanes:
    """The lanes of one slice: does for a part of a payload what a `Collective` does for the whole. Reducer thread,
    except `stop` and `close`. Raises what `Collective` says; after any error it is closed.

    Args:
        numel: elements of the whole payload.
        parts: how many slices each member has, in rank order.
        rank: this member; ``index``: this slice of it.
        connect: called with the key of each lane.
    """

    def __init__(self, key: str, numel: int, parts: Sequence[int], *, rank: int, index: int, connect: Connect) -> None:
        first = slices(numel, parts[rank])[index][0]
        self._lanes: list[tuple[slice, Collective]] = []
        self._busy = threading.Lock()  # held while ``summed`` is called
        try:
            for start, stop in lanes_of(numel, parts, rank, index):
                self._lanes.append((slice(start - first, stop - first), connect(f"{key}/lane{start}")))
        except BaseException:
            self.close()
            raise

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by all lanes."""
        return sum(lane.sent_bytes for _, lane in self._lanes)

    @property
    def received_bytes(self) -> int:
        """Bytes received by all lanes."""
        return sum(lane.received_bytes for _, lane in self._lanes)

    def all_reduce_(self, flat: Tensor, summed: Summed | None = None) -> None:
        """See `Collective.all_reduce_`; ``flat`` is the slice."""
        self._on_each(lambda where, lane: lane.all_reduce_(flat[where], self._summed(where, summed)))

    def mean_encoded_(
        self,
        flat: Tensor,
        codec: Codec,
        shares: Sequence[float],
        owed: Owed | None = None,
        carry: Carry | None = None,
        summed: Summed | None = None,
    ) -> Owed | None:
        """See `Collective.mean_encoded_`; ``flat`` is the slice, ``shares`` are the members'."""

        def mean(where: slice, lane: Collective) -> Owed | None:
            own = None if owed is None else (owed[0] - where.start, owed[1])
            carried = None if carry is None else _Behind(carry, where.start)
            left = lane.mean_encoded_(flat[where], codec, shares, own, carried, self._summed(where, summed))
            return None if left is None else (left[0] + where.start, left[1])

        found = self._on_each(mean)
        return None if owed is None else _joined([left for left in found if left is not None], flat)

    def stop(self) -> None:
        """Ends a call in progress within milliseconds. Any thread."""
        for _, lane in self._lanes:
            lane.stop()

    def close(self) -> None:
        """Drops the lanes without blocking. Any thread."""
        for _, lane in self._lanes:
            lane.close()

    def _summed(self, where: slice, summed: Summed | None) -> Summed | None:
        if summed is None:
            return None

        def there(start: int, stop: int) -> None:
            with self._busy:
                summed(where.start + start, where.start + stop)

        return there

    def _on_each(self, work: Callable[[slice, Collective], T]) -> list[T]:
        """Runs ``work`` on all lanes at once: a peer may be at any lane, and each lane has its own time-out."""
        found: list[T | None] = [None] * len(self._lanes)
        errors: list[BaseException] = []

        def run(number: int) -> None:
            where, lane = self._lanes[number]
            try:
                found[number] = work(where, lane)
            except BaseException as error:
                errors.append(error)
                self.close()  # ends the other lanes, too

        threads = [threading.Thread(target=run, args=(n,), name=f"ftopt-lane-{n}") for n in range(1, len(self._lanes))]
        for thread in threads:
            thread.start()
        if self._lanes:
            run(0)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found  # type: ignore[return-value]


class _Behind:
    """The `Carry` of a lane: the slice's ``carry``, shifted by ``first`` elements."""

    def __init__(self, carry: Carry, first: int) -> None:
        self._carry, self._first = carry, first

    def encode(self, part: Tensor, start: int, out: Tensor | None) -> None:
        self._carry.encode(part, self._first + start, out)

    def room(self, owed: Tensor) -> Tensor:
        return self._carry.room(owed)


def _joined(owed: Sequence[Owed], flat: Tensor) -> Owed:
    """Joins what is owed in several lanes into one run, with zeros between."""
    if len(owed) == 1:
        return owed[0]
    there = [(first, values) for first, values in owed if values.numel()]
    if not there:
        return 0, flat.new_empty(0)
    first = min(start for start, _ in there)
    stop = max(start + values.numel() for start, values in there)
    whole = torch.zeros(stop - first, dtype=flat.dtype, device=flat.device)
    for start, values in there:
        whole[start - first : start - first + values.numel()] = values
    return first, whole
