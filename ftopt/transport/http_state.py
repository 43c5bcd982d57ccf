"""A replica's states over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ftopt.net.tls import Tls
from ftopt.net.token import for_state
from ftopt.transport.interface import Meta, Provider
from ftopt.transport.state_server import StateServer
from ftopt.transport.state_transfer import fetch


class HttpState:
    """States over HTTP: this replica's server, and fetching from the others'.

    Args:
        host: this machine's address, as peers reach it.
        token: the job's token; replicas show each other a key derived from it.
        tls: with a certificate, the state is served over TLS; its ``ca`` is trusted when peers do so.
    """

    def __init__(self, host: str, token: str | None, tls: Tls | None = None) -> None:
        tls = tls or Tls()
        self._host = host
        self._token = for_state(token)
        self._serves = tls.server()
        self._trusts = tls.client() if tls.ca is not None else None  # the system's CAs: 40 ms, if ever they are needed
        self._server: StateServer | None = None

    async def start(self, provider: Provider, on_serve: Callable[[str, Meta], None]) -> str:
        self._server = StateServer(provider, token=self._token, host=self._host, on_serve=on_serve, tls=self._serves)
        port = await self._server.start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._serves is None else 'https'}://{host}:{port}"

    async def fetch(
        self, sources: Sequence[str], what: str, *, timeout_s: float, expect: Callable[[Meta], None]
    ) -> tuple[Meta, Mapping[str, Tensor]]:
        return await fetch(sources, what, token=self._token, timeout_s=timeout_s, expect=expect, tls=self._trusts)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
