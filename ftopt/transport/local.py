"""The transport of groups that live in one process: tests, notebooks, the oracle for bit-for-bit comparisons.

Members are threads. Sums go in rank order, ``((rank 0 + rank 1) + rank 2) + ...``, in the payload's own
dtype: a plain loop over replicas gives the same bits. The last member to come computes the sum for all, in the memory
of their payloads, piece by piece, so that each piece is read from memory once. Sums are computed on the CPU, also for
payloads on a device: the copy is complete when another thread reads it, and the code stays simple.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ftopt.codecs.codec import Codec
from ftopt.transport.encoded import alone, due, received_bytes, sent_bytes, spans, sum_codec
from ftopt.transport.interface import Carry, Owed, Summed, SumNotFinite

T = TypeVar("T")

_PIECE = 1 << 17
"""Elements summed or encoded at a time, so few that those of several members stay in the cache."""


@dataclass
class _Call:
    """One collective call: each rank's tensor, which holds the result once all have brought theirs."""

    brought: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    left: int = 0  # members that have not taken the result yet


@dataclass
class _Meeting:
    """Where the members of one key meet. Everything is guarded by ``changed``."""

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    here: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    calls: dict[int, _Call] = field(default_factory=dict)


class LocalTransport:
    """Connects members that are threads of this process and hold this very object.

    Args:
        timeout_s: seconds after which a call fails if a member does not take part.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self._meetings: dict[str, _Meeting] = {}

    def connect(self, *, key: str, rank: int, size: int, ops: object = None) -> LocalCollective:
        """Joins the group, and returns at once; `LocalCollective.open` waits for the others. ``ops`` is not used.
        Raises ConnectionError if this rank has left the group."""
        assert 0 <= rank < size, (rank, size)
        meeting = self._meetings.setdefault(key, _Meeting(size))
        assert meeting.size == size, f"group {key!r} has {meeting.size} members, not {size}"
        with meeting.changed:
            if rank in meeting.gone:
                raise ConnectionError(f"rank {rank} has left group {key!r}")
            assert rank not in meeting.here, f"rank {rank} of group {key!r} is taken"
            meeting.here.add(rank)
            meeting.changed.notify_all()
        return LocalCollective(meeting, rank, timeout_s=self.timeout_s, forget=lambda: self._meetings.pop(key, None))


class LocalCollective:
    """The in-process group of one quorum, made by `LocalTransport.connect`. Raises what `Collective` says.

    A peer is gone when it has stopped or failed before it brought its tensor. After any error the collective is closed,
    and the others fail, too.
    """

    def __init__(self, meeting: _Meeting, rank: int, *, timeout_s: float, forget: Callable[[], object]) -> None:
        self.rank = rank
        self.size = meeting.size
        self.sent_bytes = self.received_bytes = 0
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._forget = forget
        self._calls = 0
        self._stopped = False
        self._row: Sequence[int] = ()
        self._rows: list[list[int]] | None = None

    def open(self) -> None:
        """Waits until all members have joined."""
        meeting = self._meeting
        with meeting.changed:
            self._wait(lambda: len(meeting.here) == self.size)

    def all_reduce_(self, flat: Tensor, summed: Summed | None = None) -> None:
        """Sums ``flat`` (1-D, contiguous; any dtype) over the members, in place, in rank order.

        ``summed`` is called for the first half of the elements, as if the other half were on the wire.
        """
        assert flat.dim() == 1 and flat.is_contiguous(), "all_reduce_ takes a flat, contiguous tensor"
        mine = flat.detach().cpu()  # itself, or a copy
        self._meet(mine, _sum_in_rank_order_)
        _return(mine, flat)
        around = 2 * (self.size - 1) * flat.numel() * flat.element_size() // self.size  # as a ring would
        self.sent_bytes += around
        self.received_bytes += around
        if summed is not None:
            summed(0, flat.numel() // 2)

    def mean_encoded_(
        self,
        flat: Tensor,
        codec: Codec,
        shares: Sequence[float],
        owed: Owed | None = None,
        carry: Carry | None = None,
        summed: Summed | None = None,
    ) -> Owed | None:
        """The weighted mean over the members, in place, as if all had travelled encoded, in both hops.

        ``flat <- decode(encode(sum over m of shares[m] * decode(encode(flat_m)) + owed))``, the sum in fp32, in rank
        order (with an exact codec from the first payload on), encoded with ``codec.for_sum``. ``summed`` is called for
        the third quarter of the elements, then for the first, as if the others were on the wire. See
        `ftopt.transport.interface.Collective`.
        """
        assert flat.dim() == 1 and flat.is_contiguous() and flat.dtype == torch.float32, "flat, contiguous fp32 tensor"
        assert len(shares) == self.size, (shares, self.size)
        self.open()
        if self.size == 1 or not flat.numel():
            return alone(flat.detach(), owed, carry if shares[self.rank] else None)
        around = spans(flat.numel(), self.size, codec.block)
        start, stop = around[self.rank]
        debts = None if owed is None else due((owed[0], owed[1].cpu()), start, stop).clone()

        def mean(brought: Sequence[tuple[Tensor, Tensor | None]]) -> None:
            step = max(1, _PIECE // codec.block) * codec.block
            flats = [flat for flat, _ in brought]
            for (begin, end), (_, debts) in zip(around, brought, strict=True):
                for first in range(begin, end, step):
                    parts = [flat[first : min(end, first + step)] for flat in flats]
                    left = None if debts is None else debts[first - begin :][: parts[0].numel()]
                    _mean_(parts, codec, shares, left)

        try:
            if shares[self.rank] and not (codec.exact and carry is None):
                _carry_(codec, flat.detach(), carry)
            mine = flat.detach().cpu()
            self._meet((mine, debts), mean)
        except FloatingPointError:
            self.close()
            raise
        _return(mine, flat)
        self.sent_bytes += sent_bytes(flat.numel(), codec, shares, rank=self.rank)
        self.received_bytes += received_bytes(flat.numel(), codec, shares, rank=self.rank)
        if summed is not None:
            quarter = flat.numel() // 4
            summed(2 * quarter, 3 * quarter)
            summed(0, quarter)
        return None if debts is None else (start, debts.to(flat.device))

    def tell(self, row: Sequence[int]) -> None:
        self._row, self._rows = row, None

    def told(self) -> list[list[int]]:
        if self._rows is None:
            self._rows = self.exchange(self._row)
        return self._rows

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        rows = torch.zeros(self.size, len(row), dtype=torch.int64)
        rows[self.rank] = torch.tensor(list(row), dtype=torch.int64)
        self.all_reduce_(rows.view(-1))
        return cast(list[list[int]], rows.tolist())

    def stop(self) -> None:
        meeting = self._meeting
        with meeting.changed:
            self._stopped = True
            meeting.gone.add(self.rank)
            meeting.changed.notify_all()
            empty = len(meeting.gone) == self.size
        if empty:
            self._forget()

    close = stop

    def _meet(self, mine: T, combine: Callable[[Sequence[T]], None]) -> None:
        """Brings ``mine``; the last member combines what all have brought (by rank), in place."""
        meeting = self._meeting
        number, self._calls = self._calls, self._calls + 1
        with meeting.changed:
            self._check()
            call = meeting.calls.setdefault(number, _Call())
            call.brought[self.rank] = mine
            if len(call.brought) == self.size:
                combine([call.brought[rank] for rank in range(self.size)])
                call.done = True
                call.left = self.size
                call.brought.clear()
                meeting.changed.notify_all()
            try:
                self._wait(lambda: call.done)
            finally:
                call.brought.pop(self.rank, None)  # nobody reads the tensor of a member that has failed
            call.left -= 1
            if call.left == 0:
                del meeting.calls[number]

    def _check(self) -> None:
        if self._stopped:
            raise InterruptedError("the reduction was stopped")

    def _wait(self, done: Callable[[], bool]) -> None:
        """Waits on the meeting's condition until ``done``; fails if a member is gone before."""
        meeting = self._meeting
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._check()
            if done():
                return
            gone = meeting.gone - {self.rank}
            left_s = deadline - time.monotonic()
            if gone or left_s <= 0:
                self._stopped = True
                meeting.gone.add(self.rank)
                meeting.changed.notify_all()
                if gone:
                    raise ConnectionError(f"rank {min(gone)} is gone")
                raise TimeoutError(f"not all of {self.size} members came within {self._timeout_s:g} s")
            meeting.changed.wait(left_s)


def _return(mine: Tensor, flat: Tensor) -> None:
    if flat.device.type != "cpu":
        flat.detach().copy_(mine)


def _sum_in_rank_order_(flats: Sequence[Tensor]) -> None:
    for total, *others in zip(*(torch.split(flat, _PIECE) for flat in flats), strict=True):
        for other in others:
            total += other
        for other in others:
            other.copy_(total)


def _mean_(parts: Sequence[Tensor], codec: Codec, shares: Sequence[float], debts: Tensor | None) -> None:
    """``parts <- decode(encode(mean + debts))``, ``debts <- mean + debts - the new parts``."""
    terms = [(share, part) for share, part in zip(shares, parts, strict=True) if share]
    total = torch.zeros_like(parts[0])
    if codec.exact and terms:
        (_, first), *terms = terms
        for share, part in terms:
            total += (first - part).mul_(share)
        torch.sub(first, total, out=total)
    else:
        for share, part in terms:
            total += part * share
    if debts is not None:
        total += debts
    try:
        sent = roundtrip(sum_codec(codec, shares), total, parts[0])
    except FloatingPointError:
        raise SumNotFinite((rank, part) for rank, part in enumerate(parts) if shares[rank]) from None
    if debts is not None:
        torch.sub(total, sent, out=debts)
    for part in parts[1:]:
        part.copy_(sent)


def _carry_(codec: Codec, payload: Tensor, carry: Carry | None) -> None:
    """``payload <- decode(encode(payload))``, with its error feedback."""
    step = max(1, _PIECE // codec.block) * codec.block
    for start in range(0, payload.numel(), step):
        part = payload[start : start + step]
        encoded = part.new_empty(codec.encoded_bytes(part.numel()), dtype=torch.uint8)
        if carry is None:
            codec.encode(part, encoded)
        else:
            carry.encode(part, start, encoded)
        codec.decode(encoded, part)


def roundtrip(codec: Codec, flat: Tensor, out: Tensor) -> Tensor:
    """``flat`` as other replicas receive it: ``out <- decode(encode(flat))``, in the blocks that a reduction sends.

    Args:
        codec: the codec.
        flat: 1-D, contiguous, fp32; a whole payload, or a part of one that begins at a multiple of ``codec.block``.
        out: like ``flat``; may be ``flat`` itself.

    Raises:
        FloatingPointError: as `Codec.encode`.
    """
    step = max(1, _PIECE // codec.block) * codec.block
    for start in range(0, flat.numel(), step):
        codec.decode(codec.encode(flat[start : start + step]), out[start : start + step])
    return out
