"""A torch.distributed store with its keys at the coordinator, by which a quorum's members find each other.

A process group needs a place where each member leaves its address and reads the others'. ftopt opens no further port
and starts no further server for it: the store's calls travel on each replica's existing connection to the coordinator.
This file does not depend on that connection; the builder of a group injects the two operations as `StoreOps`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from ftopt.transport.interface import StoreOps


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

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Stores ``value`` at ``key`` (Gloo passes bytes, whatever the stub says)."""
        self._check()
        self._ops.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """The value at ``key``; waits for it until the deadline."""
        if key not in self.values:
            self._check()
            left_s = max(0.0, self._deadline - time.monotonic())
            try:
                self.values[key] = self._ops.get(f"{self._prefix}/{key}", left_s)
            except TimeoutError:
                who = f"rank {key.rpartition('/')[2]}"
                raise TimeoutError(f"{who} has not come to the group within {self._timeout_s:g} s") from None
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all ``keys`` are set, or for the deadline; ``timeout`` is ignored."""
        for key in keys:
            self.get(key)

    def _check(self) -> None:
        if self._stopped():
            raise InterruptedError("the group was stopped while it was connecting")
