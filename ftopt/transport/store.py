"""A torch.distributed store with its keys at the coordinator, by which a quorum's members find each other.

A process group needs a place where each member leaves its address and reads the others'. ftopt opens no further port
and starts no further server for it: the store's calls travel on each replica's existing connection to the coordinator.
This file does not depend on that connection; the builder of a group injects the two operations as `StoreOps`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from ftopt.transport.interface import StoreOps


class PeerLost(ConnectionError):
    """A member of the group is gone, or has dropped the group: ``rank``, if Gloo's message names it.

    That member is not always the first to fail: a living neighbour of a dead member drops its group, too.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RendezvousStore(Store):
    """The store of one process group while it is built. Keys are prefixed, so that groups never read each other's.

    Args:
        ops: the coordinator's store.
        key: prefix of all keys: job, fragment and attempt. An aborted attempt's addresses cannot reach the next one.
        timeout_s: seconds from construction after which a `get` still waiting raises TimeoutError.
        stopped: asked before each operation; True makes it raise InterruptedError.

    Errors of ``ops`` leave the group's constructor unchanged (Gloo passes Python's exceptions through).
    """

    def __init__(
        self, ops: StoreOps, key: str, *, timeout_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        self._ops = ops
        self._prefix = key
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._stopped = stopped
        self.values: dict[str, bytes] = {}
        """Values read so far, by key without prefix: Gloo's ``../rank`` has that rank's address."""
        self._own = b""

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Stores ``value`` at ``key`` (Gloo passes bytes, whatever the stub says)."""
        self._check()
        self._own = bytes(value)
        self._ops.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """The value at ``key``; waits for it until the deadline."""
        if key not in self.values:
            self._check()
            left_s = max(0.0, self._deadline - time.monotonic())
            rank = key.rpartition("/")[2]
            try:
                value = self._ops.get(f"{self._prefix}/{key}", left_s)
            except TimeoutError:
                raise TimeoutError(f"rank {rank} has not come to the group within {self._timeout_s:g} s") from None
            if not is_address(value, self._own):
                what = f"what is stored as the address of rank {rank} is none ({len(value)} bytes)"
                raise PeerLost(what, rank=int(rank) if rank.isdecimal() else None)
            self.values[key] = value
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all ``keys`` are set, or for the deadline; ``timeout`` is ignored."""
        for key in keys:
            self.get(key)

    def _check(self) -> None:
        if self._stopped():
            raise InterruptedError("the group was stopped while it was connecting")


_WORD = struct.Struct("<Q")
_MOST_HOST = 256
_FAMILIES = (b"\x02\x00", b"\x0a\x00")
"""First bytes of a ``sockaddr_in`` and a ``sockaddr_in6``."""


def is_address(value: bytes, own: bytes) -> bool:
    """Whether ``value`` has the form of a member's address as Gloo writes it. Any member can store any bytes, and Gloo
    reads them without a check, which could end the process.

    The form is that of ``own``, this member's, which Gloo of the same version has written: length and text of the
    host's name, length and bytes of a socket's address, a number for each member. If ``own`` has another form, as on
    another system, all but an empty value are taken.
    """
    form = _form(own)
    return bool(value) if form is None else _form(value) == form


def _form(value: bytes) -> tuple[int, int] | None:
    """The lengths of the socket's address, and of what follows it; None: ``value`` has another form."""
    try:
        (host,) = _WORD.unpack_from(value)
        (address,) = _WORD.unpack_from(value, _WORD.size + min(host, _MOST_HOST))
    except struct.error:  # too short
        return None
    begin = 2 * _WORD.size + min(host, _MOST_HOST)
    if host > _MOST_HOST or value[begin : begin + 2] not in _FAMILIES or begin + address > len(value):
        return None
    return address, len(value) - begin - address
