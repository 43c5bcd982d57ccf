"""What a transport is: the process groups of attempts, and the transfer of states between peers.

`ftopt.sync` and `ftopt.optimizer` know only these types; `ftopt.connect` chooses the implementations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ftopt.codecs.codec import Codec

Summed = Callable[[int, int], None]
"""Called with start and stop of a part of a tensor that is already summed, while other parts are not. Parts come in any
order, and need not cover the tensor."""

Owed = tuple[int, Tensor]
"""What a member owes of earlier encoded sums: the first element, and fp32 values from there on, in the mean's units."""

Meta = dict[str, str]
"""Names a state: version, chain, digest, ...; equal on all peers that hold the same state."""

Provider = Callable[[str], Awaitable[tuple[Meta, Mapping[str, Tensor]]]]
"""Returns ``state/<fragment>``, the committed state, or ``copy/<replica>``. Raises KeyError for what never exists, and
LookupError for what does not exist yet; so may the tensors, when they are first read. Raises `Busy` after a second."""


class Busy(LookupError):
    """The state exists, but cannot be read until the training thread is within the next call of its optimizer."""


class SourceBusy(ConnectionError):
    """No source gives the state, but one of them is `Busy`: ask again at once."""


class Carry(Protocol):
    """Error feedback of the first hop, which a member carries from one payload to the next, part by part."""

    def encode(self, part: Tensor, start: int, out: Tensor | None) -> None:
        """Encodes ``part`` of the payload (fp32, from element ``start`` on) and what is carried, in sum, into ``out``,
        and carries what that leaves out; ``part`` may change. ``out`` None: ``part`` becomes the sum, and nothing is
        left out."""

    def room(self, owed: Tensor) -> Tensor:
        """Uninitialized memory like ``owed``, for what this member owes afterwards."""


class Collective(Protocol):
    """The process group of one quorum. Blocking, used on the reducer thread only; `stop` and `close` from any thread.

    Raises (all methods): InterruptedError when stopped; ConnectionError when a peer is gone; TimeoutError when no piece
    is done within the time-out. After any of them the collective, and each tensor given to it, must not be used again
    (a piece may still be written to).
    """

    rank: int
    size: int

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this member has sent so far, by the algorithm's count (a ring: 2 (n-1)/n of each
        tensor)."""

    @property
    def received_bytes(self) -> int:
        """Payload bytes that this member has received so far, by the same count."""

    def all_reduce_(self, flat: Tensor, summed: Summed | None = None) -> None:
        """Sums ``flat`` (contiguous, 1-D) over the members, in place, in pieces; bit-equal on all members.

        ``summed`` is called while later pieces are on the wire, and may change the elements that it is given.
        """

    def mean_encoded_(
        self,
        flat: Tensor,
        codec: Codec,
        shares: Sequence[float],
        owed: Owed | None = None,
        carry: Carry | None = None,
        summed: Summed | None = None,
    ) -> Owed | None:
        """The weighted mean of the members' ``flat`` (contiguous, 1-D, fp32), in place; bit-equal on all members.

        ``flat`` is not multiplied by the shares yet; these are all members', in rank order. Each payload travels
        encoded and is decoded, the products are added in fp32 in rank order, and the sum travels encoded. The payload
        of a member of share 0 is not read. A single member keeps its payload.

        With an exact codec the mean of equal values is that value, bit for bit, whatever the shares: each share is
        multiplied by the difference of its payload from the first one of positive share.

        Each member sums up one span. It adds what it ``owed`` there, unless that is None (then on all members), and
        returns what the encoded sum leaves out, to be passed to the next call if this one counts.
        ``carry`` encodes the parts of the payload, if it is given; ``summed`` as in `all_reduce_`.

        Also raises FloatingPointError when a lossy codec meets NaN or Inf in the own payload, `SumNotFinite` in the
        sum; the collective is then closed.
        """

    def tell(self, row: Sequence[int]) -> None:
        """Begins to exchange a row of int64 (of one length on all members), while other calls follow."""

    def told(self) -> list[list[int]]:
        """Waits for the rows that all members have told; returns them in rank order."""

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Does `tell` and `told` at once, with a row of its own."""

    def stop(self) -> None:
        """Ends a call in progress within milliseconds; all later calls raise InterruptedError."""

    def close(self) -> None:
        """Drops the group without blocking, also when a peer hangs."""


class SumNotFinite(FloatingPointError):
    """A member's sum of the payloads holds NaN or Inf: not by the fault of the one that adds them up.

    Attributes:
        ranks: the members whose payloads do; empty: each is finite.
    """

    def __init__(self, decoded: Iterable[tuple[int, Tensor]]) -> None:
        self.ranks = [rank for rank, payload in decoded if not bool(payload.isfinite().all())]
        whose = f"the payloads of ranks {', '.join(map(str, self.ranks))} hold NaN or Inf"
        super().__init__(whose if self.ranks else "the sum of the payloads is not finite, although each of them is")


class StoreOps(Protocol):
    """The two operations of the coordinator's key-value store. Blocking; any thread."""

    def set(self, key: str, value: bytes) -> None:
        """Stores ``value`` at ``key``.

        Raises:
            ConnectionError: the link to the coordinator is lost; at once, not after a time-out.
        """

    def get(self, key: str, timeout_s: float) -> bytes:
        """Returns the value at ``key``; waits until it is set.

        Raises:
            ConnectionError: the link to the coordinator is lost; at once, not after a time-out.
            TimeoutError: ``key`` was not set within ``timeout_s`` seconds.
        """


class Transport(Protocol):
    """Makes the process groups of attempts."""

    def connect(self, *, key: str, rank: int, size: int, ops: StoreOps) -> Collective:
        """Starts to connect to the other members, and returns at once; the collective can be stopped from then on.

        Args:
            key: names the group: job, fragment, attempt. The same for all members, never used twice.
            rank: this member's place, 0 to ``size - 1``.
            size: number of members. 1: nothing is connected.
            ops: the coordinator's store. Called on a background thread.
        """


class StateTransfer(Protocol):
    """Serves states to peers and fetches theirs. Network thread."""

    async def start(self, provider: Provider, on_serve: Callable[[str, Meta], None]) -> str:
        """Starts to serve; returns the address that peers use."""

    async def fetch(
        self, sources: Sequence[str], what: str, *, timeout_s: float, expect: Callable[[Meta], None]
    ) -> tuple[Meta, Mapping[str, Tensor]]:
        """Returns a peer's state. Raises ConnectionError when no source gives it."""

    async def stop(self) -> None: ...
