"""The transport of groups that live in one process: tests, notebooks, the oracle for bit-for-bit comparisons.

Members are threads. Sums go in rank order, ``((rank 0 + rank 1) + rank 2) + ...``, in the payload's own
dtype: a plain loop over replicas gives the same bits. Sums are computed on the CPU, also for payloads on a device: the
copy is complete when another thread reads it, and the code stays simple.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ftopt.codecs.codec import Codec
from ftopt.transport.encoded import alone, pay_, received_bytes, sent_bytes, spans, sum_codec
from ftopt.transport.interface import Carry, Owed, Summed

_PIECE = 1 << 20
"""Elements (about) that `roundtrip` encodes at a time: bounds its memory."""


@dataclass
class _Call:
    """One collective call: each rank's tensor, and the result once all have brought theirs."""

    brought: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
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
        flat.detach().copy_(self._meet(flat.detach().cpu(), _sum_in_rank_order))
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
        start, stop = spans(flat.numel(), self.size, codec.block)[self.rank]
        debts = torch.zeros_like(flat, device="cpu")
        if owed is not None:
            first, values = owed
            pay_((first, values.cpu()), debts[start:stop], start)

        def mean(brought: dict[int, Tensor]) -> Tensor:
            total = torch.zeros_like(debts)
            terms = [(share, brought[rank][0]) for rank, share in enumerate(shares) if share]
            first = terms[0][1] if codec.exact and terms else None
            for share, flat in terms:
                total += (flat if first is None else first - flat) * share
            total = total if first is None else first - total
            for rank in range(self.size) if owed is not None else ():
                total += brought[rank][1]
            sent = roundtrip(sum_codec(codec, shares), total, torch.empty_like(total))
            return torch.stack([sent, total - sent])

        try:
            mine = _carried(codec, flat.detach(), carry) if shares[self.rank] else torch.zeros_like(flat)
            result, left = self._meet(torch.stack([mine.cpu(), debts]), mean)
        except FloatingPointError:
            self.close()
            raise
        flat.detach().copy_(result)
        self.sent_bytes += sent_bytes(flat.numel(), codec, shares, rank=self.rank)
        self.received_bytes += received_bytes(flat.numel(), codec, shares, rank=self.rank)
        if summed is not None:
            quarter = flat.numel() // 4
            summed(2 * quarter, 3 * quarter)
            summed(0, quarter)
        return None if owed is None else (start, left[start:stop].to(flat.device, copy=True))

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

    def _meet(self, mine: Tensor, combine: Callable[[dict[int, Tensor]], Tensor]) -> Tensor:
        """Brings ``mine``; the last member combines all tensors (by rank). Returns the same result tensor to all."""
        meeting = self._meeting
        number, self._calls = self._calls, self._calls + 1
        with meeting.changed:
            self._check()
            call = meeting.calls.setdefault(number, _Call())
            call.brought[self.rank] = mine
            if len(call.brought) == self.size:
                call.total = combine(call.brought)
                call.left = self.size
                call.brought.clear()
                meeting.changed.notify_all()
            try:
                self._wait(lambda: call.total is not None)
            finally:
                call.brought.pop(self.rank, None)  # nobody reads the tensor of a member that has failed
            assert call.total is not None
            call.left -= 1
            if call.left == 0:
                del meeting.calls[number]
            return call.total  # nobody writes to it any more

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


def _sum_in_rank_order(brought: dict[int, Tensor]) -> Tensor:
    total = brought[0].clone()
    for rank in range(1, len(brought)):
        total += brought[rank]
    return total


def _carried(codec: Codec, payload: Tensor, carry: Carry | None) -> Tensor:
    if carry is not None:
        carry.before(payload, 0)
    encoded = codec.encode(payload)
    if carry is not None:
        carry.after(payload, 0, encoded)
    return codec.decode(encoded, torch.empty_like(payload))


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
