"""Reductions over Gloo that end within milliseconds when a peer dies or the attempt is aborted.

One `GlooTransport` per process, one `GlooCollective` per attempt (kept while the quorum stays the same). It adds four
things to a plain ``torch.distributed.all_reduce``:

- **It can be stopped.** The group is built on a thread of its own, and a reduction is waited for in slices of
  5 ms (a ``Work.wait(timeout)`` that times out does not affect the work), so `GlooCollective.stop` always takes
  effect. Waiting in slices costs 1 % of a core, and reacts as fast as a plain wait; a callback into Python
  from Gloo's threads would be no faster, and is a hazard at the interpreter's exit.
- **It is dropped without waiting.** Gloo's destructor of a group waits for unfinished works, up to Gloo's own
  time-out when a peer hangs; `abort` does not wake them. So a background thread shuts down the group's sockets,
  then drops the group.
- **All members notice a death.** Only the dead member's neighbours in the ring notice it themselves. They drop
  their group at once, which their neighbours notice in turn.
- **Progress is timed, not the whole.** A payload goes in pieces; the time-out limits the time without a piece.

Measured (torch 2.13, 2 cores, loopback, 1 thread per process): a group of 4 is built in 2.5 ms (median; 9 ms at
most); a row, or a small payload, reaches all members in 0.1 ms (of 2 members), 0.24 ms (3), 0.5 ms (4), where an
all-reduce takes 0.3, 2.6 and 8.6 ms, most of it CPU time of Gloo's threads; a killed peer is noticed by all of 3 to
5 members in 10-30 ms on an idle machine; `stop` ends a call within 8 ms.
50M fp32 by 3 members, as a multiple of one call (0.16-0.18 s): pieces of 1 MiB 1.7-2.2, 4 MiB 1.1-1.2, 8 MiB
1.0, 16 MiB 1.0. Where the network is slower than loopback, the difference vanishes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Work

from ftopt.codecs.codec import Codec
from ftopt.errors import UserError
from ftopt.net import descriptors
from ftopt.transport.encoded import Buffers, EncodedMean, Exchange, alone
from ftopt.transport.gloo_group import GlooGroup, PeerSilent, first_line
from ftopt.transport.interface import Carry, Owed, StoreOps, Summed
from ftopt.transport.lanes import Lanes
from ftopt.transport.staging import Staging, StagingFor, ahead, staging_for

T = TypeVar("T")

_log = logging.getLogger(__name__)
_SPARE = 32
"""File descriptors kept free besides two per member: a group needs 5 more, and other code opens some meanwhile."""
_THREADS = 2
"""Pieces that Gloo works on at a time: one is added up while the other is on the wire."""
_DEPTH = 4
"""Pieces handed to Gloo and not waited for yet, so that its threads never idle."""
_DIRECT_BYTES, _ALL_BYTES = 128 << 10, 1 << 20
"""A payload of at most this many bytes is sent whole to each member, unless that are more in all: one hop instead of a
ring's 2 (n-1), with a fifth of its messages. Of 8 members on 2 cores, 64 KB take 7 ms instead of 30."""


class GlooTransport:
    """Makes the process groups of a replica's attempts.

    Args:
        host: this machine's name or address, as its peers reach it; the groups listen there, on a free port.
        timeout_s: seconds after which an attempt fails if no piece is done, or a peer does not connect. With
            pieces of 4 MiB, two on the wire at a time, 3 s are enough down to about 45 Mbit/s.
        piece_bytes: bytes per piece. Default 4 MiB: on loopback pieces then take about 1.15 times as long as one call;
            smaller ones take longer (1 MiB: 1.7), larger ones need a faster network for the same ``timeout_s``.
        staging: how payloads on a device get to the host and back. Default: `staging_for`.

    Attributes:
        parts: number of slices of this member's payloads; this process has the first (`ftopt.transport.lanes`).

    Raises:
        ftopt.errors.UserError: ``host`` is not an address of this machine, or a number is out of range.
    """

    def __init__(
        self, host: str, timeout_s: float, *, piece_bytes: int = 4 << 20, staging: StagingFor = staging_for
    ) -> None:
        if not timeout_s > 0:
            raise UserError(f"timeout_s={timeout_s}; must be a number of seconds above 0")
        if piece_bytes < 8:
            raise UserError(f"piece_bytes={piece_bytes}; must be at least 8, some MiB are sensible")
        self.host = host
        self.timeout_s = timeout_s
        self.piece_bytes = piece_bytes
        self._staging = staging
        self.parts = 1
        self._seldom = descriptors.Seldom(_log)
        try:
            self._device()
        except RuntimeError as error:
            raise UserError(
                f"host={host!r} is not an address of this machine; give the name or address by which peers "
                f"reach it ({first_line(error)})"
            ) from None

    def connect(self, *, key: str, rank: int, size: int, ops: StoreOps) -> GlooCollective:
        """As `ftopt.transport.interface.Transport` says. Wait with `GlooCollective.open`, or just reduce."""
        found = GlooCollective(
            self._group(key, rank, size, ops, word=self.parts), piece_bytes=self.piece_bytes, staging=self._staging
        )
        found.connect_lanes = partial(self.lanes, key=key, rank=rank, ops=ops)
        found.key, found.ops = key, ops
        return found

    def lanes(self, numel: int, parts: Sequence[int], *, key: str, rank: int, ops: StoreOps, index: int = 0) -> Lanes:
        """Starts to connect slice ``index`` of a payload of ``numel`` elements with the processes of the group ``key``
        that hold the same elements in the other members. Member m has ``parts[m]`` slices."""

        def connect(key: str) -> GlooCollective:
            group = self._group(key, rank, len(parts), ops)
            return GlooCollective(group, piece_bytes=self.piece_bytes, staging=self._staging)

        return Lanes(key, numel, parts, rank=rank, index=index, connect=connect)

    def _group(self, key: str, rank: int, size: int, ops: StoreOps, *, word: int | None = None) -> GlooGroup:
        assert 0 <= rank < size, (rank, size)
        if size > 1 and (left := descriptors.free()) < (needed := _SPARE + 2 * size):
            wrong = (
                f"{left} file descriptors are left, a process group of {size} needs {needed}: Gloo would end this "
                f"process when there are none. This process may have {descriptors.limit()}: allow more (ulimit -n), or "
                "find what does not close its files"
            )
            self._seldom.warn(wrong)
            raise _reaches_nobody(wrong, rank)
        options = cast(Any, ProcessGroupGloo)._Options()
        try:
            options._devices = [self._device()]
        except RuntimeError as error:  # the interface is down, or no port is free: the next attempt may succeed
            raise _reaches_nobody(f"no process group on {self.host}: {first_line(error)}", rank) from None
        options._threads = _THREADS
        # Our time-out comes first; Gloo's bounds how long a dropped group lives on in the background.
        options._timeout = timedelta(seconds=self.timeout_s + 1)
        return GlooGroup(key, rank, size, ops, options=options, timeout_s=self.timeout_s, word=word)

    def _device(self) -> Any:
        """A device is a listening port. Each group has its own, by which its sockets are recognized."""
        return cast(Any, ProcessGroupGloo).create_device(hostname=self.host, lazy_init=False)


def _reaches_nobody(wrong: str, rank: int) -> PeerSilent:
    """Names a member that this one cannot reach, so that the others stop trying with this member."""
    return PeerSilent(wrong, rank=int(rank == 0))


class GlooCollective:
    """The process group of one quorum, made by `GlooTransport.connect`. Raises what `Collective` says.

    ConnectionError is `PeerLost`, or, while connecting, the loss of the link to the coordinator. TimeoutError, also for
    a peer that did not connect, is `PeerSilent` if the host of a known member cannot be reached. After any error the
    collective is closed, so that the other members fail, too.
    """

    connect_lanes: Callable[[int, Sequence[int]], Lanes]
    key: str
    ops: StoreOps

    def __init__(self, group: GlooGroup, *, piece_bytes: int, staging: StagingFor) -> None:
        self.rank = group.rank
        self.size = group.size
        self._sent_bytes = self._received_bytes = 0
        self._lanes: dict[int, Lanes] = {}
        self._closing = threading.Lock()
        self._group = group
        self._piece_bytes = piece_bytes
        self._staging = cache(staging)
        self._buffers = cache(Buffers)
        self._rows = torch.empty(0, 0, dtype=torch.int64)

    @property
    def sent_bytes(self) -> int:
        """See `Collective`."""
        return self._sent_bytes + sum(lanes.sent_bytes for lanes in self._lanes.values())

    @property
    def received_bytes(self) -> int:
        """See `Collective`."""
        return self._received_bytes + sum(lanes.received_bytes for lanes in self._lanes.values())

    def open(self) -> None:
        """Waits until all members are connected; afterwards it costs nothing."""
        self._group.open()

    def parts(self) -> list[int]:
        """The number of slices of each member's payloads."""
        self.open()
        return self._group.words

    def lanes(self, numel: int) -> Lanes:
        """The lanes of this process' slice of a payload of ``numel`` elements."""
        parts = self.parts()
        with self._closing:
            self._group.check()
            if numel not in self._lanes:
                self._lanes[numel] = self.connect_lanes(numel, parts)
        return self._lanes[numel]

    def stop(self) -> None:
        self._end(Lanes.stop, self._group.stop)

    def close(self) -> None:
        self._end(Lanes.close, self._group.close)

    def _end(self, lanes: Callable[[Lanes], None], group: Callable[[], None]) -> None:
        group()  # first: no lanes are made after it
        with self._closing:
            for each in self._lanes.values():
                lanes(each)

    def _lanes_for(self, flat: Tensor) -> Lanes | None:
        """The lanes for ``flat``; None: no member's payloads are in slices."""
        return self.lanes(flat.numel()) if flat.numel() and max(self.parts()) > 1 else None

    def all_reduce_(self, flat: Tensor, summed: Summed | None = None) -> None:
        """As `ftopt.transport.interface.Collective` says; fp32 or int64.

        On a CUDA device, work queued on the current stream from here on sees the sum. ``summed`` is called on the CPU
        only: its work is hidden as long as the wire is slower, and its elements are in the cache.
        """
        assert flat.dim() == 1 and flat.is_contiguous(), "all_reduce_ takes a flat, contiguous tensor"
        if (lanes := self._lanes_for(flat)) is not None:
            self._by(lambda: lanes.all_reduce_(flat, summed))
        else:
            self._reduce_whole(flat, summed)

    def _reduce_whole(self, flat: Tensor, summed: Summed | None = None) -> None:
        """Reduces all of ``flat`` by this group, without lanes. Small payloads are added up in rank order."""
        whole = flat.numel() * flat.element_size()
        if self.size > 1 and whole:
            to_all = (self.size - 1) * whole
            direct = whole <= _DIRECT_BYTES and to_all <= _ALL_BYTES
            around = to_all if direct else 2 * to_all // self.size
            self._sent_bytes += around
            self._received_bytes += around
            if direct:
                total, *others = self._gathered(flat.detach().cpu())
                for other in others:
                    total += other
                flat.detach().copy_(total)
                return
            pieces = torch.split(flat.detach(), max(1, self._piece_bytes // flat.element_size()))
            self._reduce(pieces, self._staging(flat.device), summed if flat.device.type == "cpu" else None)

    def mean_encoded_(
        self,
        flat: Tensor,
        codec: Codec,
        shares: Sequence[float],
        owed: Owed | None = None,
        carry: Carry | None = None,
        summed: Summed | None = None,
    ) -> Owed | None:
        """As `ftopt.transport.interface.Collective` says, by `EncodedMean`; the bits are those of `LocalCollective`.

        The payload is encoded and decoded on its own device; only encoded bytes go to the host.
        """
        assert flat.dim() == 1 and flat.is_contiguous() and flat.dtype == torch.float32, "flat, contiguous fp32 tensor"
        assert len(shares) == self.size, (shares, self.size)
        self.open()
        if self.size == 1 or not flat.numel():
            return alone(flat.detach(), owed, carry if shares[self.rank] else None)
        if (lanes := self._lanes_for(flat)) is not None:
            return self._by(lambda: lanes.mean_encoded_(flat, codec, shares, owed, carry, summed))
        mean = EncodedMean(
            flat.detach(),
            codec,
            shares,
            rank=self.rank,
            piece_bytes=self._piece_bytes,
            owed=owed,
            carry=carry,
            buffers=self._buffers(flat.device),
            summed=summed if flat.device.type == "cpu" else None,
        )
        under_way: deque[tuple[Exchange, Tensor]] = deque()
        staging = self._staging(flat.device)
        with self._group.works() as (box, pending), ExitStack() as stack:
            stack.callback(staging.join)

            def start(hop: Exchange) -> None:
                sent, received = staging.begin(hop.sent)(), staging.room(hop.received)
                under_way.append((hop, received))
                self._sent_bytes += hop.sent.numel()
                self._received_bytes += hop.received.numel()
                pending.append(box[0].alltoall_base(received, sent, hop.received_sizes, hop.sent_sizes))

            def finish() -> Exchange:
                self._group.finish(pending, time.monotonic())
                hop, received = under_way.popleft()
                staging.back(received, hop.received)
                staging.join()
                return hop

            return mean.run(start, finish)

    def tell(self, row: Sequence[int]) -> None:
        self.open()
        with self._group.works() as (box, _):
            self._rows = self._begin(torch.tensor(row, dtype=torch.int64), box, self._group.told)

    def told(self) -> list[list[int]]:
        if self._group.told:
            with self._group.works():
                self._group.finish(self._group.told, time.monotonic())
        self._group.check()
        return cast(list[list[int]], self._rows.tolist())

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        return cast(list[list[int]], self._gathered(torch.tensor(row, dtype=torch.int64)).tolist())

    def _by(self, work: Callable[[], T]) -> T:
        """Runs ``work`` on the lanes; when it fails, the group is closed."""
        try:
            return work()
        except BaseException:
            self.close()
            raise

    def _gathered(self, own: Tensor) -> Tensor:
        """All members' ``own`` (1-D, on the host, of one length), in rank order."""
        self.open()
        with self._group.works() as (box, pending):
            rows = self._begin(own, box, pending)
            if pending:
                self._group.finish(pending, time.monotonic())
        return rows

    def _begin(self, own: Tensor, box: list[Any], works: deque[Work]) -> Tensor:
        """Begins `_gathered` with the group in ``box``; returns what is its result once the new one of ``works`` is
        done. A single member has nothing to wait for."""
        sent = own.expand(self.size, -1).contiguous()
        if self.size == 1 or not own.numel():
            return sent
        rows = torch.empty_like(sent)
        works.append(box[0].alltoall_base(rows.view(-1), sent.view(-1), [], []))
        return rows

    def _reduce(self, pieces: Iterable[Tensor], staging: Staging, summed: Summed | None) -> None:
        under_way: deque[tuple[Tensor, Tensor]] = deque()
        with self._group.works() as (box, pending), ExitStack() as stack:
            stack.callback(staging.join)
            since_s, done = time.monotonic(), 0

            def finish() -> None:
                nonlocal since_s, done
                since_s = self._group.finish(pending, since_s)
                piece, host = under_way.popleft()
                staging.back(host, piece)
                if summed is not None and pending:
                    summed(done, done + piece.numel())
                    since_s = time.monotonic()
                done += piece.numel()

            for piece, host in ahead(staging, pieces):
                under_way.append((piece, host))
                pending.append(box[0].allreduce([host]))
                if len(pending) == _DEPTH:
                    finish()
            while pending:
                finish()
