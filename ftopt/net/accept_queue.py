"""Connections that are not authenticated yet: limited in number and in time.

Without this limit, anybody who reaches the port could open idle connections until none is left for the job's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


class AcceptQueue:
    """A protocol factory that wraps another, for ``loop.create_server``. Loop thread only.

    ``turned_away`` counts the connections that were closed here.

    When the queue is full, the connection that has waited longest is closed: a flood displaces itself, while a replica
    needs only milliseconds.

    Args:
        make: makes the protocol of a new connection.
        limit: how many connections may wait.
        patience_s: seconds after which a connection that was not admitted is closed.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], *, limit: int, patience_s: float) -> None:
        self._make = make
        self._limit = limit
        self._patience_s = patience_s
        self._waiting: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._flooded = False
        self.turned_away = 0

    def __call__(self) -> asyncio.Protocol:
        protocol = self._make()
        loop = asyncio.get_running_loop()
        self._waiting[protocol] = loop.call_later(self._patience_s, self._turn_away, protocol)
        if len(self._waiting) > self._limit:
            if not self._flooded:
                _log.warning("more than %d connections wait for authentication; the oldest are closed", self._limit)
            self._flooded = True
            self._turn_away(next(iter(self._waiting)))
        return protocol

    def __len__(self) -> int:
        return len(self._waiting)

    def let_in(self, transport: asyncio.BaseTransport | None) -> None:
        """Admits the request on this connection."""
        if transport is not None:
            self._forget(transport.get_protocol())

    def close(self) -> None:
        """Closes all waiting connections."""
        for protocol in list(self._waiting):
            self._turn_away(protocol)

    def _turn_away(self, protocol: asyncio.BaseProtocol) -> None:
        self._forget(protocol)
        # None until the TLS handshake is done; the handshake has a time limit of its own.
        transport = getattr(protocol, "transport", None)
        if transport is not None:  # also None once the connection has ended
            self.turned_away += 1
            transport.abort()

    def _forget(self, protocol: asyncio.BaseProtocol) -> None:
        timer = self._waiting.pop(protocol, None)
        if timer is not None:
            timer.cancel()
        self._flooded = self._flooded and 2 * len(self._waiting) > self._limit
