"""The weighted mean of payloads that travel encoded: who sends what, and the arithmetic. The caller moves the bytes.

The payload is cut into one span per member, of nearly equal size and of whole codec blocks. Rank r sums up span r.

1. **First hop**, all to all: every member sends its span r, encoded, to rank r. Rank r decodes the spans and adds them
   up in fp32, in rank order: ``sum over m of share_m * decode(encode(flat_m))``. Its own span is encoded, too. With an
   exact codec the sum is ``flat_f - sum over m of share_m * (flat_f - flat_m)``, f being the first member of positive
   share: equal values have exactly that value as their mean, although shares are rounded.
2. **Second hop**, all to all: rank r sends its sum, encoded with ``codec.for_sum`` (mostly the same codec), to every
   member, which decodes it. Rank r *owes* what this encoding leaves out of the sum: it adds that to its next sum of the
   same elements.

All members decode the same bytes, so the results are bit-equal. The boundaries of the spans do not affect the results,
since a span is whole blocks. Both hops are encoded: if one were fp32, fp4 would save a factor below 2, not 7.9.

A member sends (n-1)/n of the payload's encoded bytes in each hop, as in a ring. A member of share 0 sends nothing in
the first hop: its payload is neither encoded nor read.

Both hops go in pieces: piece j is the j-th part of every span. The second hop of a piece overlaps with the first hop
of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ftopt.codecs.codec import Codec
from ftopt.transport.interface import Carry, Owed, Summed, SumNotFinite

_AT_ONCE, _ELSEWHERE = 1 << 18, 1 << 22
"""Elements processed at a time, on a CPU (so few that they stay in the cache) and on other devices."""
_LEAST_BYTES, _PIECES = 1 << 18, 4
"""A payload goes in at least `_PIECES`, so that its two hops overlap, unless these were smaller than `_LEAST_BYTES`."""
_KEPT = 8
"""Buffers kept for reuse: those of the four exchanges that exist at a time."""


class Buffers:
    """Byte buffers that exchanges reuse: fresh memory costs as much as three passes over it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """The smallest that is large enough: exchanges of the two hops have different sizes."""
        fit = [(buffer.numel(), place) for place, buffer in enumerate(self._free) if size <= buffer.numel()]
        return self._free.pop(min(fit)[1])[:size] if fit else torch.empty(size, dtype=torch.uint8, device=self._device)

    def give(self, *buffers: Tensor) -> None:
        """Takes back buffers that are no longer in use."""
        self._free += [buffer.new_empty(0).set_(buffer.untyped_storage()) for buffer in buffers if buffer.numel()]
        del self._free[:-_KEPT]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One all-to-all: the parts for and from the other ranks in rank order (uint8), with their sizes, 0 for this rank.

    ``own``: this rank's part, which goes to nobody (first hop), or is the one that all get (second hop).
    """

    own: Tensor
    sent: Tensor
    sent_sizes: list[int]
    received: Tensor
    received_sizes: list[int]


def due(owed: Owed, start: int, stop: int) -> Tensor:
    """What is owed for the elements from ``start`` to ``stop``.

    Values owed for elements that another member sums up now are dropped: one rounding of one mean is lost.
    """
    first, values = owed
    if (start, stop) == (first, first + values.numel()):
        return values
    found, low, high = values.new_zeros(stop - start), max(start, first), min(stop, first + values.numel())
    if low < high:
        found[low - start : high - start] = values[low - first : high - first]
    return found


def alone(flat: Tensor, owed: Owed | None, carry: Carry | None) -> Owed | None:
    """The mean of one member: nothing is sent or left out, and everything owed and carried is added."""
    if carry is not None:
        carry.encode(flat, 0, None)
    if owed is None:
        return None
    first, values = owed
    flat[first : first + values.numel()] += values
    return 0, flat.new_empty(0)


def spans(numel: int, size: int, block: int) -> list[tuple[int, int]]:
    """Start and stop of each rank's span of ``numel`` elements: whole blocks, whose numbers differ by 1 at most."""
    blocks = -(-numel // block)
    ends = [min(numel, blocks * rank // size * block) for rank in range(size + 1)]
    return list(pairwise(ends))


def sent_bytes(numel: int, codec: Codec, shares: Sequence[float], *, rank: int) -> int:
    """Bytes that ``rank`` sends to others in both hops."""
    lengths = [stop - start for start, stop in spans(numel, len(shares), codec.block)]
    others = sum(codec.encoded_bytes(length) for other, length in enumerate(lengths) if other != rank)
    return bool(shares[rank]) * others + (len(shares) - 1) * sum_codec(codec, shares).encoded_bytes(lengths[rank])


def received_bytes(numel: int, codec: Codec, shares: Sequence[float], *, rank: int) -> int:
    """Bytes that ``rank`` receives from others in both hops."""
    lengths = [stop - start for start, stop in spans(numel, len(shares), codec.block)]
    others = [other for other in range(len(shares)) if other != rank]
    parts = sum(bool(shares[other]) for other in others) * codec.encoded_bytes(lengths[rank])
    return parts + sum(sum_codec(codec, shares).encoded_bytes(lengths[other]) for other in others)


def sum_codec(codec: Codec, shares: Sequence[float]) -> Codec:
    return codec.for_sum(sum(share > 0 for share in shares))


class EncodedMean:
    """One member's part in one mean: `offer`, `add_up` and `take` for each piece, with an exchange between two of them.

    Args:
        flat: 1-D, contiguous, fp32; the member's payload, and, piece by piece, the result.
        codec: encodes the payload.
        shares: all members' shares, in rank order.
        rank: this member.
        piece_bytes: bytes that one exchange sends, at most (but a block to each member at least).
        owed: what this member owes of earlier sums; None: no account is kept.
        carry: its error feedback; None: there is none.
        buffers: for the exchanges.
        summed: called with the complete parts of the mean, while others are on the wire; None: nothing is called.
    """

    def __init__(
        self,
        flat: Tensor,
        codec: Codec,
        shares: Sequence[float],
        *,
        rank: int,
        piece_bytes: int,
        owed: Owed | None,
        carry: Carry | None,
        buffers: Buffers,
        summed: Summed | None,
    ) -> None:
        self._flat = flat
        self._summed = summed
        self._carry = carry
        self._buffers = buffers
        self._codec = codec
        self._sum_codec = sum_codec(codec, shares)
        self._shares = shares
        self._rank = rank
        self._ranks = range(len(shares))
        self._spans = spans(flat.numel(), len(shares), codec.block)
        block_bytes = max(c.encoded_bytes(codec.block) for c in (codec, self._sum_codec))
        whole = block_bytes * -(-flat.numel() // codec.block)
        piece_bytes = min(piece_bytes, max(_LEAST_BYTES, whole // _PIECES))
        blocks = max(1, piece_bytes // (len(shares) * block_bytes))
        self._step = blocks * codec.block
        self.pieces = max(-(-(stop - start) // self._step) for start, stop in self._spans)
        at_once = _AT_ONCE if flat.device.type == "cpu" else _ELSEWHERE
        self._at_once = min(self._step, max(1, at_once // codec.block) * codec.block)
        self._room = flat.new_empty(3 if codec.exact else 1, self._at_once)
        self._first, stop = self._spans[rank]
        self._owed, self._left = None if owed is None else due(owed, self._first, stop), flat.new_empty(0)
        if self._owed is not None:
            self._left = torch.empty_like(self._owed) if carry is None else carry.room(self._owed)

    def run(self, start: Callable[[Exchange], None], finish: Callable[[], Exchange]) -> Owed | None:
        """Runs all pieces: ``start`` puts an exchange on the wire, ``finish`` waits for the oldest one.

        Returns what this member owes afterwards.
        """
        for piece in range(self.pieces + 2):
            if piece < self.pieces:
                start(self.offer(piece))
            if 1 <= piece <= self.pieces:
                start(self.add_up(piece - 1, finish()))
            if piece >= 2:
                self.take(piece - 2, finish())
        return None if self._owed is None else (self._first, self._left)

    def offer(self, piece: int) -> Exchange:
        """The first hop: this member's parts of all spans, each for the rank that sums it up."""
        sizes = [self._codec.encoded_bytes(len(self._part(rank, piece))) for rank in self._ranks]
        size, sent = sizes[self._rank], sizes if self._shares[self._rank] else [0] * len(sizes)
        exchange = self._exchange(sent, [size if share else 0 for share in self._shares], sent[self._rank])
        if self._shares[self._rank]:
            for rank, place in enumerate(self._places(exchange.sent, exchange.sent_sizes, exchange.own)):
                for start, stop, bytes_ in self._parts(rank, piece, self._codec):
                    part, encoded = self._flat[start:stop], place[bytes_]
                    if self._carry is None:
                        self._codec.encode(part, encoded)
                    else:
                        self._carry.encode(part, start, encoded)
        return exchange

    def add_up(self, piece: int, first: Exchange) -> Exchange:
        """The second hop: the sum of all members' parts of this member's span, for every member."""
        received = self._places(first.received, first.received_sizes, first.own)
        among = [rank for rank, share in enumerate(self._shares) if share]
        terms = [(self._shares[rank], received[rank]) for rank in among]
        sizes = [self._sum_codec.encoded_bytes(len(self._part(rank, piece))) for rank in self._ranks]
        size = sizes[self._rank]
        exchange = self._exchange([size] * len(sizes), sizes, 0)
        mine = exchange.own
        sums = self._parts(self._rank, piece, self._sum_codec)
        for (start, stop, bytes_), (*_, their) in zip(sums, self._parts(self._rank, piece, self._codec), strict=True):
            total, left, owed = self._room[0][: stop - start], None, None
            if self._codec.exact:
                self._mean_of_values([(share, place[their]) for share, place in terms], total)
            else:
                total.zero_()
                for share, place in terms:
                    self._codec.add(place[their], share, total)
            if self._owed is not None:
                left, owed = (flat[start - self._first : stop - self._first] for flat in (self._left, self._owed))
            try:
                self._sum_codec.encode(total, mine[bytes_], left, owed)
            except FloatingPointError:
                decoded = (self._codec.decode(place[their], torch.empty_like(total)) for _, place in terms)
                raise SumNotFinite(zip(among, decoded, strict=True)) from None
        for place in torch.split(exchange.sent, max(1, size))[1:]:
            place.copy_(mine)
        self._buffers.give(first.sent, first.received)
        return exchange

    def _mean_of_values(self, terms: Sequence[tuple[float, Tensor]], total: Tensor) -> None:
        """``total <- first - sum of share * (first - other)``."""
        term, apart = self._room[1][: total.numel()], self._room[2][: total.numel()].zero_()
        if not terms:
            total.zero_()
            return
        self._codec.decode(terms[0][1], total)
        for share, place in terms[1:]:
            apart += torch.sub(total, self._codec.decode(place, term), out=term).mul_(share)
        total -= apart

    def take(self, piece: int, second: Exchange) -> None:
        """Decodes the result into ``flat``."""
        for rank, encoded in enumerate(self._places(second.received, second.received_sizes, second.own)):
            part = self._part(rank, piece)
            self._sum_codec.decode(encoded, self._flat[part.start : part.stop])
            if self._summed is not None and piece + 1 < self.pieces:
                self._summed(part.start, part.stop)
        self._buffers.give(second.sent, second.received)

    def _part(self, rank: int, piece: int) -> range:
        """Elements of a rank's span that go in this piece."""
        return range(*self._spans[rank])[piece * self._step : (piece + 1) * self._step]

    def _parts(self, rank: int, piece: int, codec: Codec) -> Iterator[tuple[int, int, slice]]:
        """Cuts a rank's part of a piece at whole blocks: start and stop of each, and its bytes within the piece's."""
        part = self._part(rank, piece)
        first = part.start
        for start in part[:: self._at_once]:
            stop = min(part.stop, start + self._at_once)
            yield start, stop, slice(codec.encoded_bytes(start - first), codec.encoded_bytes(stop - first))

    def _exchange(self, sent: list[int], received: list[int], own: int) -> Exchange:
        """``own``: bytes that go to nobody, behind those sent; 0: this rank's part is the first one sent."""
        size = sent[self._rank]
        sent = [*sent[: self._rank], 0, *sent[self._rank + 1 :]]
        received = [*received[: self._rank], 0, *received[self._rank + 1 :]]
        room = self._buffers.take(sum(sent) + own)
        others = room[: sum(sent)]
        mine = room[len(others) :] if own else room[:size]
        return Exchange(mine, others, sent, self._buffers.take(sum(received)), received)

    def _places(self, parts: Tensor, sizes: list[int], own: Tensor) -> list[Tensor]:
        """The parts of all ranks, one of which is ``own``."""
        found = list(torch.split(parts, sizes))
        found[self._rank] = own
        return found
