"""A replica's committed state over HTTP: this replica's server, and fetching from the others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ftopt.sync.ports import Meta, Provider
from ftopt.transport.state_transfer import StateServer, fetch


class HttpState:
    """The committed state over HTTP: this replica's server, and fetching from the others'."""

    def __init__(self, host: str, token: str | None) -> None:
        self._host = host
        self._token = token
        self._server: StateServer | None = None

    async def start(self, provider: Provider, on_serve: Callable[[int, Meta], None]) -> str:
        self._server = StateServer(provider, token=self._token, host=self._host, on_serve=on_serve)
        port = await self._server.start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{port}"

    async def fetch(
        self, sources: Sequence[str], fragment: int, *, timeout_s: float, expect: Callable[[Meta], None]
    ) -> tuple[Meta, Mapping[str, Tensor]]:
        return await fetch(sources, fragment, token=self._token, timeout_s=timeout_s, expect=expect)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
