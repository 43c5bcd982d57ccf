"""Connections that are not authenticated yet: limited in number and in time.

Without this limit, anybody who reaches the port could open idle connections until none is left for the job's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)
_DOOMED_S = 60.0
"""Longer than any TLS handshake takes or is allowed to."""


class AcceptQueue:
    """A protocol factory that wraps another, for ``loop.create_server``. Loop thread only.

    ``turned_away`` counts the connections that were closed here.

    When the queue is full, the connection that has waited longest is closed: a flood displaces itself, while a replica
    needs only milliseconds. A connection leaves the queue when it is admitted, is closed here, or ends.

    Args:
        limit: how many connections may wait.
        patience_s: seconds after which a connection that was not admitted is closed.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], *, limit: int, patience_s: float) -> None:
        self._make = make
        self._limit = limit
        self._patience_s = patience_s
        self._waiting: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._doomed: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        """Turned away before they were connected, as during a TLS handshake: closed as soon as they are."""
        self._kinds: dict[type, type] = {}
        self._flooded = False
        self.turned_away = 0

    def __call__(self) -> asyncio.Protocol:
        protocol = self._make()
        kind = type(protocol)
        if kind not in self._kinds:
            self._kinds[kind] = _watched(kind, self._connected, self._forget)
        protocol.__class__ = self._kinds[kind]
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
        if transport is not None:
            self._forget(transport.get_protocol())

    def close(self) -> None:
        for protocol in list(self._waiting):
            self._turn_away(protocol)

    def _connected(self, protocol: asyncio.BaseProtocol, transport: asyncio.BaseTransport) -> None:
        if (timer := self._doomed.pop(protocol, None)) is not None:
            timer.cancel()
            self._abort(transport)

    def _turn_away(self, protocol: asyncio.BaseProtocol) -> None:
        self._forget(protocol)
        if (transport := getattr(protocol, "transport", None)) is not None:
            self._abort(transport)
        else:  # it is not connected yet
            loop = asyncio.get_running_loop()
            self._doomed[protocol] = loop.call_later(_DOOMED_S, self._doomed.pop, protocol, None)

    def _abort(self, transport: asyncio.BaseTransport) -> None:
        self.turned_away += 1
        transport.abort()  # type: ignore[attr-defined]  # every transport of a stream has it

    def _forget(self, protocol: asyncio.BaseProtocol) -> None:
        timer = self._waiting.pop(protocol, None)
        if timer is not None:
            timer.cancel()
        self._flooded = self._flooded and 2 * len(self._waiting) > self._limit


def _watched(
    kind: type,
    connected: Callable[[asyncio.BaseProtocol, asyncio.BaseTransport], None],
    ended: Callable[[asyncio.BaseProtocol], None],
) -> type:
    """A subclass of a protocol's class that reports. Without fields of its own, so that an object may change to it."""

    def connection_made(self: asyncio.Protocol, transport: asyncio.BaseTransport) -> None:
        kind.connection_made(self, transport)  # type: ignore[attr-defined]
        connected(self, transport)

    def connection_lost(self: asyncio.Protocol, error: Exception | None) -> None:
        ended(self)
        kind.connection_lost(self, error)  # type: ignore[attr-defined]

    methods = {"connection_made": connection_made, "connection_lost": connection_lost}
    return type(kind.__name__, (kind,), {"__slots__": (), **methods})
