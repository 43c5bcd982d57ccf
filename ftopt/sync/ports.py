"""What the client needs from outside `ftopt.sync`, as Protocols: whoever connects puts the real parts in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ftopt.sync.group import Collective

Meta = dict[str, str]
Provider = Callable[[str], tuple[Meta, Mapping[str, Tensor]]]
"""Of ``state/<fragment>``, the committed state, or ``copy/<replica>``. Raises LookupError."""


class StoreOps(Protocol):
    """The rendezvous store of a process group."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes: ...


class Transport(Protocol):
    """Makes the process groups of attempts."""

    def connect(self, *, key: str, rank: int, size: int, ops: StoreOps) -> Collective: ...


class StateTransfer(Protocol):
    """Serves states to peers and fetches theirs. Network thread."""

    async def start(self, provider: Provider, on_serve: Callable[[str, Meta], None]) -> str:
        """Serves; returns the address that peers use."""

    async def fetch(
        self, sources: Sequence[str], what: str, *, timeout_s: float, expect: Callable[[Meta], None]
    ) -> tuple[Meta, Mapping[str, Tensor]]:
        """A peer's state. Raises ConnectionError when no source gives it."""

    async def stop(self) -> None: ...
