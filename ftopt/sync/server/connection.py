"""The coordinator's end of a replica's WebSocket: limits on what it receives, and a queue of what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

from aiohttp import web

from ftopt.sync.server.limits import Limits, Meter

_log = logging.getLogger(__name__)
_FAREWELL_S = 0.2
"""Seconds to wait for the other side's farewell: a frozen host never sends one."""


class Connection:
    """One prepared WebSocket. Loop thread only."""

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.Transport | None, limits: Limits) -> None:
        self._socket = socket
        self._transport = transport
        self._limits = limits
        now = time.monotonic()
        self._meters = (
            Meter("messages", limits.messages_per_s, limits.message_burst, now),
            Meter("bytes", limits.bytes_per_s, limits.byte_burst, now),
        )
        self._unsent: deque[str] = deque()
        self._unsent_bytes = 0
        self._ending = False
        self._wake = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    def meter(self, text: str) -> None:
        """Counts a message that came; raises `Exceeded` when there are too many."""
        now = time.monotonic()
        for meter, amount in zip(self._meters, (1, len(text)), strict=True):
            meter.draw(amount, now)

    def send(self, text: str) -> None:
        """Sends in order, without waiting."""
        if self._ending:
            return
        self._unsent.append(text)
        self._unsent_bytes += len(text)
        self._wake.set()
        if self._unsent_bytes > self._limits.unsent_bytes:
            _log.warning("a connection does not read: %d bytes wait for it; it is closed", self._unsent_bytes)
            self._unsent.clear()
            self.abort()

    def close(self) -> None:
        """Ends the connection, after all messages sent before."""
        self._ending = True
        self._wake.set()

    def abort(self) -> None:
        """Ends the connection now."""
        self.close()
        if self._transport is not None:
            self._transport.abort()

    async def end(self) -> None:
        """Stops writing, since the connection has ended."""
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                while self._unsent:
                    text = self._unsent.popleft()
                    await self._socket.send_str(text)
                    self._unsent_bytes -= len(text)
                if self._ending:
                    break
                self._wake.clear()
                await self._wake.wait()
            await asyncio.wait([asyncio.ensure_future(self._socket.close())], timeout=_FAREWELL_S)
            if self._transport is not None:
                self._transport.abort()
