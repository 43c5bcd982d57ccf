"""A connection that ends sends what waits for a slow reader first."""

from __future__ import annotations

import asyncio
import base64
import socket

from aiohttp import web

from ftopt.sync.server.connection import _FAREWELL_S, Connection
from ftopt.sync.server.limits import Limits

MANY_BYTES = 8_000_000
"""More than the kernel's buffers hold."""


def test_a_slow_reader_gets_all_that_was_sent_before_the_end() -> None:
    async def scene() -> bytes:
        sent = asyncio.Event()

        async def handle(request: web.Request) -> web.WebSocketResponse:
            answer = web.WebSocketResponse(compress=False)
            await answer.prepare(request)
            assert isinstance(request.transport, asyncio.Transport)
            connection = Connection(answer, request.transport, Limits())
            connection.send("x" * MANY_BYTES)
            connection.send("the last word")
            connection.close()
            sent.set()
            async for _ in answer:
                pass
            await connection.end()
            return answer

        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        with socket.socket() as listening, socket.socket() as reader:
            listening.bind(("127.0.0.1", 0))
            site = web.SockSite(runner, listening)
            await site.start()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            reader.connect(listening.getsockname())
            key = base64.b64encode(bytes(16))
            reader.sendall(
                b"GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key + b"\r\n\r\n"
            )
            await sent.wait()
            await asyncio.sleep(3 * _FAREWELL_S)  # longer than the wait for a farewell
            read = await asyncio.wait_for(asyncio.to_thread(_all, reader), 30)
            reader.close()
            await runner.cleanup()
        return read

    read = asyncio.run(scene())
    assert len(read) > MANY_BYTES
    assert b"the last word" in read[-100:]


def _all(reader: socket.socket) -> bytes:
    found = bytearray()
    while b"the last word" not in found[-100:] and (more := reader.recv(1 << 20)):
        found += more
    return bytes(found)
