"""The replica's connection to a coordinator in another process: a WebSocket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress

import aiohttp

from ftopt.errors import Refused
from ftopt.net.tls import why_not
from ftopt.net.token import authorization
from ftopt.sync.protocol.limits import MAX_MESSAGE_BYTES
from ftopt.sync.replica.link import Channel

_ANSWER_S = 3.0
"""Seconds that a coordinator may take to open a connection."""


class WebSocketLink:
    """A WebSocket to ``url`` (``http://host:port`` or ``https://host:port``).

    Args:
        url: the coordinator's address.
        token: the job's token, None without.
        dead_after_s: seconds without an answer to a ping after which the coordinator counts as lost.
        tls: which CAs to trust when ``url`` is ``https://``.
    """

    def __init__(self, url: str, *, token: str | None, dead_after_s: float, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        self._headers = authorization(token)
        self._tls = tls if tls is not None else True
        self._heartbeat_s = dead_after_s * 2 / 3  # aiohttp waits half of that for the answer
        self._session: aiohttp.ClientSession | None = None

    async def open(self, receive: Callable[[str], None]) -> Channel:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=2.0))
        try:
            async with asyncio.timeout(_ANSWER_S):  # `wait_for` of Python 3.11 may lose a cancellation
                socket = await self._session.ws_connect(
                    f"{self.url}/connect",
                    headers=self._headers,
                    heartbeat=self._heartbeat_s,
                    max_msg_size=MAX_MESSAGE_BYTES,
                    compress=0,
                    ssl=self._tls,
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                wrong = "does not accept this token" if self._headers else "needs a token"
                raise Refused(
                    f"the coordinator at {self.url} {wrong}; give the token that the coordinator was started with: "
                    "--token-file FILE, the environment variable FTOPT_TOKEN, or token= in a script"
                ) from None
            if error.status == 403:
                raise Refused(
                    f"the coordinator at {self.url} has no token, listens on this machine alone, and does not "
                    "answer to that name; use 127.0.0.1 or localhost in the address, or start it with a token"
                ) from None
            raise Refused(f"{self.url} is no ftopt coordinator: it answers {error.status}; check the address") from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise Refused(_tls_message(self.url, error.certificate_error)) from None
        except aiohttp.ClientConnectorSSLError as error:
            raise Refused(_tls_message(self.url, error.os_error)) from None
        except aiohttp.ClientConnectorError as error:
            raise ConnectionError(f"{self.url}: {error.os_error.strerror or error.os_error}") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConnectionError(f"{self.url}: {str(error) or 'no answer'}") from None
        return _WebSocketChannel(socket, receive)

    async def end(self) -> None:
        if self._session is not None:
            await self._session.close()


def _tls_message(url: str, error: Exception) -> str:
    return why_not(url, error if isinstance(error, ssl.SSLError) else ssl.SSLError(str(error)))


class _WebSocketChannel:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse, receive: Callable[[str], None]) -> None:
        self._socket = socket
        self._queue: asyncio.Queue[tuple[str, Callable[[], None] | None] | None] = asyncio.Queue()
        self._ended = False
        self._reader = asyncio.create_task(self._read(receive))
        self._writer = asyncio.create_task(self._write())

    def send(self, text: str, sent: Callable[[], None] | None = None) -> None:
        self._queue.put_nowait((text, sent))

    async def closed(self) -> None:
        ended, _ = await asyncio.wait([self._reader, self._writer], return_when=asyncio.FIRST_COMPLETED)
        await self._end()
        for task in ended:
            with suppress(OSError, aiohttp.ClientError, asyncio.CancelledError):
                task.result()

    async def close(self) -> None:
        self._queue.put_nowait(None)
        await asyncio.wait([self._writer], timeout=1.0)
        await self._end()

    async def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for task in (self._reader, self._writer):
            task.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)
        if not self._socket.closed:
            # Does not wait for the other side's farewell: it may be frozen.
            await asyncio.wait([asyncio.ensure_future(self._socket.close())], timeout=0.2)

    async def _read(self, receive: Callable[[str], None]) -> None:
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            receive(message.data)

    async def _write(self) -> None:
        while (item := await self._queue.get()) is not None:
            text, sent = item
            try:
                await self._socket.send_str(text)
            except (ConnectionError, aiohttp.ClientError):
                return
            if sent is not None:
                sent()
