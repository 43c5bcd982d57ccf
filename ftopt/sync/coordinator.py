"""The coordinator's shell: HTTP and WebSocket on one port, a journal, a timer; the decisions are the machine's.

``GET /status`` answers JSON; ``GET /connect`` is the WebSocket of a replica. A job is whatever name a hello carries:
each has a machine of its own and knows nothing of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from ftopt.errors import UserError
from ftopt.events import OnEvent, ignore
from ftopt.sync.job import Job, Peer
from ftopt.sync.journal import Journal
from ftopt.sync.link import MAX_MESSAGE_BYTES
from ftopt.sync.protocol import messages as m

_log = logging.getLogger(__name__)


class CoordinatorServer:
    """The coordinator of any number of jobs, in the running asyncio loop.

    Args:
        host: address to listen on.
        port: port, 0 for a free one.
        journal: the file of the journal; None: decisions are lost with the process, and replicas that reconnect within
            ``recovery_s`` tell the next one what they hold.
        token: what every request must bring; None: anybody may.
        on_event: is told what happens.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        journal: Path | None = None,
        token: str | None = None,
        on_event: OnEvent = ignore,
    ) -> None:
        self._host = host
        self._port = port
        self._journal = Journal(journal)
        self._token = token
        self._on_event = on_event
        self._jobs: dict[str, Job] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listens; returns the port.

        Raises:
            UserError: the address is in use, or no address of this machine.
        """
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/status", self._status)
        app.router.add_get("/connect", self._connect)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}; "
                "end what uses the port, or choose another one (port 0 takes a free one)"
            ) from None
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Ends all connections; the journal stays."""
        for job in self._jobs.values():
            job.end()
        if self._runner is not None:
            await self._runner.cleanup()
        self._journal.close()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if self._token is not None:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                raise web.HTTPUnauthorized(text="a token is needed")
        response: web.StreamResponse = await handler(request)
        return response

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"jobs": [job.status() for _, job in sorted(self._jobs.items())]})

    async def _connect(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        writer = asyncio.create_task(_write(socket, queue))
        job: Job | None = None
        conn = 0
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                try:
                    parsed = m.decode(message.data)
                except m.MessageError as error:
                    _log.warning("a message from %s is refused: %s", request.remote, error)
                    break
                if job is None:
                    if not isinstance(parsed, m.Hello):
                        break
                    job = self._job(parsed.job)
                    conn = job.open(Peer(queue.put_nowait, lambda: queue.put_nowait(None)))
                if not isinstance(parsed, m.FromReplica):
                    break
                job.receive(conn, parsed)
        finally:
            if job is not None:
                job.lost(conn)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        return socket

    def _job(self, name: str) -> Job:
        if name not in self._jobs:
            self._jobs[name] = Job(name, self._journal, self._on_event)
        return self._jobs[name]


async def _write(socket: web.WebSocketResponse, queue: asyncio.Queue[str | None]) -> None:
    with contextlib.suppress(ConnectionError):
        while (text := await queue.get()) is not None:
            await socket.send_str(text)
        # A frozen host never says goodbye: don't wait for it.
        await asyncio.wait([asyncio.ensure_future(socket.close())], timeout=0.2)
        if request_transport := getattr(socket, "_req", None):
            transport = request_transport.transport
            if transport is not None:
                transport.abort()


def run_coordinator(
    bind: str,
    *,
    journal: Path | None = None,
    token: str | None = None,
    on_event: OnEvent = ignore,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serves until SIGTERM or Ctrl-C. Blocking.

    Args:
        bind: ``host:port``; port 0 takes a free one.
        journal: see `CoordinatorServer`.
        token: see `CoordinatorServer`.
        on_event: see `CoordinatorServer`.
        ready: called with the address once it listens.

    Raises:
        UserError: ``bind`` is no address, or in use; the journal cannot be used.
    """
    host, port = parse_address(bind)

    async def main() -> None:
        server = CoordinatorServer(host, port, journal=journal, token=token, on_event=on_event)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        taken = await server.start()
        if ready is not None:
            ready(f"http://{host}:{taken}")
        await stop.wait()
        await server.stop()

    asyncio.run(main())


def parse_address(bind: str) -> tuple[str, int]:
    """``host:port`` as a pair; raises `UserError`."""
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UserError(f"address {bind!r}; must be HOST:PORT with a port from 0 to 65535, e.g. 0.0.0.0:29400")
    return host.strip("[]") or "0.0.0.0", int(port)
