"""The coordinator's end of a replica's WebSocket: limits on what it receives and on what waits to be sent."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from ftopt.sync.server.limits import Limits, Meter

_log = logging.getLogger(__name__)
_FAREWELL_S = 0.2
"""Seconds to wait for the other side's farewell: a frozen host never sends one."""
_SENDING_S = 10.0
"""The most seconds that messages sent before may take to leave."""
_TEXT, _IN_2_BYTES, _IN_8_BYTES = b"\x81", 126, 127
"""The first byte of a frame with a whole text; lengths that say in how many bytes the length follows (RFC 6455)."""


class Connection:
    """One prepared WebSocket. Loop thread only. Texts go to its transport as frames of their own, which takes no task
    and no turn of the loop."""

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.Transport | None, limits: Limits) -> None:
        self._socket = socket
        self._transport = transport
        self._limits = limits
        now = time.monotonic()
        self._meters = (
            Meter("messages", limits.messages_per_s, limits.message_burst, now),
            Meter("bytes", limits.bytes_per_s, limits.byte_burst, now),
        )
        self._closing: asyncio.Task[None] | None = None

    def meter(self, text: str) -> None:
        """Counts a message that came; raises `Exceeded` when there are too many."""
        now = time.monotonic()
        for meter, amount in zip(self._meters, (1, len(text)), strict=True):
            meter.draw(amount, now)

    def send(self, text: str) -> None:
        """Sends in order, without waiting."""
        if self._closing is not None or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame(text))
        waiting = self._transport.get_write_buffer_size()
        if waiting > self._limits.unsent_bytes:
            _log.warning("a connection does not read: %d bytes wait for it; it is closed", waiting)
            self.abort()

    def close(self) -> None:
        """Ends the connection, after all messages sent before."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    def abort(self) -> None:
        """Ends the connection now."""
        self.close()
        if self._transport is not None:
            self._transport.abort()

    async def end(self) -> None:
        """Stops closing, since the connection has ended."""
        if self._closing is not None:
            self._closing.cancel()
            await asyncio.gather(self._closing, return_exceptions=True)

    async def _close(self) -> None:
        until, closing = time.monotonic() + _SENDING_S, asyncio.ensure_future(self._socket.close())
        while True:  # what waits for a slow connection goes first
            await asyncio.wait([closing], timeout=_FAREWELL_S)
            if self._transport is None or not self._transport.get_write_buffer_size() or time.monotonic() >= until:
                break
            await asyncio.sleep(_FAREWELL_S)
        if self._transport is not None:
            self._transport.abort()


def frame(text: str) -> bytes:
    """A WebSocket frame, as a server sends it: without a mask."""
    data = text.encode()
    if (length := len(data)) < _IN_2_BYTES:
        return _TEXT + bytes((length,)) + data
    wide = length >= 1 << 16
    return _TEXT + bytes((_IN_8_BYTES if wide else _IN_2_BYTES,)) + length.to_bytes(8 if wide else 2) + data
