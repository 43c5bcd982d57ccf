"""The coordinator's shell: HTTP and WebSocket on one port, a journal and a timer. The machine makes the decisions.

``GET /status`` answers JSON, ``GET /metrics`` Prometheus' text; ``GET /`` is the live page, and ``GET /live`` its data;
``GET /connect`` is the WebSocket of a replica. A hello names its job: each job has a machine of its own and knows
nothing of the others. A request without the token gets 401, whatever its path, except for the live page, which holds no
data. On a server without a token, a request of a foreign web page gets 403. A replica that breaks the protocol or a
limit loses the connection, and its job goes on (``docs/security.md``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from ftopt.events import OnEvent, ignore
from ftopt.net import descriptors
from ftopt.net.accept_queue import AcceptQueue
from ftopt.net.browsers import from_a_page, is_loopback
from ftopt.net.http import guarded, quiet
from ftopt.net.tls import HANDSHAKE_S
from ftopt.net.token import admits
from ftopt.sync.protocol import limits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.admission import other_protocol
from ftopt.sync.protocol.limits import MAX_MESSAGE_BYTES
from ftopt.sync.server.address import cannot_listen
from ftopt.sync.server.connection import Connection
from ftopt.sync.server.job import Job, Peer
from ftopt.sync.server.journal import Journal
from ftopt.sync.server.limits import Exceeded, Limits
from ftopt.sync.server.remembered import remembered
from ftopt.sync.server.start import filled
from ftopt.sync.server.trace import Trace
from ftopt.watch.live import live
from ftopt.watch.page import page
from ftopt.watch.prometheus import CONTENT_TYPE, Exposition, resident_bytes
from ftopt.watch.rings import SAMPLE_S

_log = logging.getLogger(__name__)
_PING_S = 30.0
"""Seconds between pings. A connection that does not answer is closed, even if its job does not watch it yet."""
_DISK_S = 2.0
"""Seconds after which a job's status says that a write is slow; a write takes milliseconds."""
_KEEPALIVE_S = 15.0
_QUIET_S = 10.0
"""Seconds between two log lines about wrong tokens, so that strangers cannot fill the log."""


class CoordinatorServer:
    """The coordinator of any number of jobs. Use `run`, or `start` and `stop` in a running asyncio loop.

    Args:
        host: address to listen on.
        port: port, 0 for a free one.
        journal: the file of the journal; None: decisions are lost with the process, and replicas that reconnect within
            ``recovery_s`` tell the next process what they hold.
        new: its jobs are new, with no living replicas. Default False: without a journal that knows the job, newcomers
            alone start it no sooner than ``recovery_s`` after this coordinator can be reached.
        start_replicas: the number of replicas that a new job waits for, if its settings have none. None: as many as a
            quorum needs, so that it starts at once.
        token: what every request must bring; None: all may connect.
        tls: certificate and key to serve with; None: without TLS.
        open_status: answer ``/status``, ``/metrics`` and ``/live`` without the token, too.
        limits: of its connections and jobs.
        trace: gets each decision of each job, for people; None: no trace. Closed by `stop`.
        on_event: called with each event of each job.

    Raises:
        UserError: the journal cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        journal: Path | None = None,
        new: bool = False,
        start_replicas: int | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        open_status: bool = False,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        trace: Trace | None = None,
        on_event: OnEvent = ignore,
    ) -> None:
        self._trace, self._given_up = trace, set[str]()
        self._host, self._port = host, port
        self._journal = Journal(journal)
        self._token, self._tls = token, tls
        self._open = {"/status", "/metrics", "/live"} if open_status else set()
        self._shown_to_the_network = open_status and not is_loopback(host)  # else only to this machine's users
        self._limits, self._on_event = limits, on_event
        self._jobs: dict[str, Job] = {}
        self._remembered = remembered(self._journal, limits.jobs)
        self._refused = dict.fromkeys(("token", "page", "connections", "message", "limit"), 0)
        self._new, self._start_replicas = new, start_replicas
        self._began_s = time.monotonic()
        self._connections: set[Connection] = set()
        self._cut_until_s = self._quiet_until_s = 0.0
        self._sampling: asyncio.TimerHandle
        self._runner: web.AppRunner
        self._accept_queue: AcceptQueue
        self._server: asyncio.Server

    async def start(self) -> int:
        """Starts to listen; returns the port.

        Raises:
            UserError: the address is in use, or is not an address of this machine.
        """
        self._began_s = time.monotonic()
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/", _page)
        app.router.add_get("/live", self._live)
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/connect", self._connect)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet(__name__),
            shutdown_timeout=0.2,
            keepalive_timeout=_KEEPALIVE_S,
            auto_decompress=False,
        )
        await self._runner.setup()
        self._accept_queue = AcceptQueue(
            guarded(self._runner),
            limit=min(self._limits.waiting, max(1, descriptors.limit() // 4)),
            patience_s=self._limits.patience_s,
        )
        options: dict[str, Any] = {"ssl_handshake_timeout": HANDSHAKE_S} if self._tls is not None else {}
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._accept_queue, self._host, self._port, ssl=self._tls, backlog=self._limits.waiting, **options
            )
        except OSError as error:
            await self._runner.cleanup()
            raise await cannot_listen(self._host, self._port, error) from None
        self._sampling = loop.call_later(SAMPLE_S, self._sample)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Ends all connections, after `start`; the journal stays."""
        self._sampling.cancel()
        self._server.close()
        self._accept_queue.close()
        await self._written()
        for job in self._jobs.values():
            job.close()
        await self._runner.cleanup()
        for job in self._jobs.values():
            job.close()
        self._journal.close()
        if self._trace is not None:
            self._trace.close()

    def run(self, *, ready: Callable[[str], None]) -> None:
        """Serves until SIGTERM or Ctrl-C; outside the main thread, forever. Blocking; no loop may run in this thread.
        ``ready``: called with the address.

        Raises:
            UserError: as `start`.
        """
        asyncio.run(self._run(ready))

    async def _run(self, ready: Callable[[str], None]) -> None:
        stop, accept_errors = asyncio.Event(), descriptors.AcceptErrors(_log)

        def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if not accept_errors.takes(context):
                loop.default_exception_handler(context)

        asyncio.get_running_loop().set_exception_handler(on_exception)
        descriptors.raise_limit()
        if threading.current_thread() is threading.main_thread():  # the only one that can handle signals
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        port = await self.start()
        if self._token is None and not is_loopback(self._host):
            _log.warning(
                "listens on %s:%d without a token: all that reach the port can join a job, read its model and corrupt "
                "it; give --token-file, or set FTOPT_TOKEN",
                self._host,
                port,
            )
        host = f"[{self._host}]" if ":" in self._host else self._host
        ready(f"{'http' if self._tls is None else 'https'}://{host}:{port}")
        await stop.wait()
        await self.stop()

    def cut(self, for_s: float) -> None:
        """Cuts this coordinator off for ``for_s`` seconds, for fault injection. Loop thread."""
        self._cut_until_s = time.monotonic() + for_s
        for connection in list(self._connections):
            connection.abort()

    def give_up(self, replica: str) -> None:
        """Notes that the replica is not started again, so that no new job waits for it. Loop thread."""
        self._given_up.add(replica)
        for job in self._jobs.values():
            job.give_up(replica)

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        admitted = admits(self._token, request.headers.get("Authorization", ""))
        if request.path not in self._open and not admitted:
            if request.path == "/" and request.method in ("GET", "HEAD"):  # it holds no data, and asks for the token
                shown = await _page(request)
                shown.force_close()
                return shown
            self._refused["token"] += 1
            if time.monotonic() >= self._quiet_until_s:
                self._quiet_until_s = time.monotonic() + _QUIET_S
                _log.warning("%s is turned away: no token, or a wrong one", request.remote)
            refusal = web.HTTPUnauthorized(text="a token is needed", headers={"WWW-Authenticate": "Bearer"})
            refusal.force_close()
            raise refusal
        if self._token is None or not (admitted or self._shown_to_the_network):
            connects = request.path == "/connect"
            if why := from_a_page(request.headers, host=self._host, connects=connects):
                self._refused["page"] += 1
                if time.monotonic() >= self._quiet_until_s:
                    self._quiet_until_s = time.monotonic() + _QUIET_S
                    _log.warning("a request of %s is refused: %s", request.remote, ascii(why))
                forbidden = web.HTTPForbidden(text=f"refused: {why}; use this machine's address, or start with a token")
                forbidden.force_close()
                raise forbidden
        self._accept_queue.let_in(request.transport)
        response: web.StreamResponse = await handler(request)
        if self._token is not None and request.path in self._open:  # may be a stranger's, who may send many
            response.force_close()
        return response

    async def _status(self, request: web.Request) -> web.Response:
        await self._written()
        known = self._remembered | {name: job.status() for name, job in self._jobs.items()}
        return web.json_response({"jobs": [shown for _, shown in sorted(known.items())]})

    async def _written(self) -> None:
        """Waits for the disk, `_DISK_S` at most, so that what is shown, or said at the end, is on disk."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISK_S):
                for job in list(self._jobs.values()):
                    await job.written()

    async def _live(self, request: web.Request) -> web.Response:
        await self._written()
        jobs = {name: (job.live_status(), job.history) for name, job in self._jobs.items()}
        return web.json_response(live(jobs, request.query), headers={"Cache-Control": "no-store"})

    def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        self._sampling = loop.call_later(SAMPLE_S, self._sample)  # first: whatever is raised below
        for job in self._jobs.values():
            job.sample()

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._written()
        shown = Exposition()
        shown.add("ftopt_uptime_seconds", time.monotonic() - self._began_s)
        shown.add("ftopt_journal_bytes", self._journal.size())
        shown.add("ftopt_connections", len(self._connections))
        shown.add("ftopt_waiting_connections", len(self._accept_queue))
        if (memory := resident_bytes()) is not None:
            shown.add("ftopt_resident_memory_bytes", memory)
        for reason, count in {**self._refused, "accept_queue": self._accept_queue.turned_away}.items():
            shown.add("ftopt_refused_connections_total", count, reason=reason)
        for _, job in sorted(self._jobs.items()):
            job.show(shown)
        return web.Response(body=shown.text().encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        if time.monotonic() < self._cut_until_s and request.transport is not None:
            request.transport.abort()
            return web.Response()
        if len(self._connections) >= self._limits.connections:
            self._refused["connections"] += 1
            _log.warning("%s is turned away: %d replicas are connected", request.remote, len(self._connections))
            raise web.HTTPServiceUnavailable(text="too many connections")
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False, heartbeat=_PING_S)
        try:
            await socket.prepare(request)
        except ConnectionError:  # gone already
            return web.Response()
        connection = Connection(socket, request.transport, self._limits)
        self._connections.add(connection)
        try:
            await self._listen(socket, connection)
        except (m.MessageError, Exceeded) as error:
            self._refused["limit" if isinstance(error, Exceeded) else "message"] += 1
            _log.warning("the connection of %s is closed: %s", request.remote, ascii(str(error))[:300])
        except ConnectionError:
            pass  # the replica has gone while its ping was answered
        finally:
            await connection.end()
            self._connections.discard(connection)
        return socket

    async def _listen(self, socket: web.WebSocketResponse, connection: Connection) -> None:
        """Hands a replica's messages to its job, until the connection ends.

        Raises:
            MessageError: a message is invalid, or came out of order.
            Exceeded: a limit is exceeded.
        """
        loop = asyncio.get_running_loop()
        impatience = loop.call_later(self._limits.patience_s, connection.abort)
        job: Job | None = None
        conn, refused = 0, False
        try:
            async for message in socket:
                if message.type is WSMsgType.ERROR:
                    raise m.MessageError(f"{message.data}")
                if message.type is not WSMsgType.TEXT:
                    raise m.MessageError("it sends no text")
                connection.meter(message.data)
                if refused:
                    continue
                parsed = m.from_replica(message.data) if job is not None else self._hello(message.data, connection)
                if parsed is None:
                    refused = True
                    continue
                if job is None:
                    assert isinstance(parsed, m.Hello)
                    impatience.cancel()
                    job = self._job(parsed.job)
                    conn = job.open(Peer(connection.send, connection.close))
                elif isinstance(parsed, m.Hello):
                    raise m.MessageError("a second hello on one connection; a hello is its first message")
                job.metrics.message("received", len(message.data))
                job.receive(conn, parsed)
        finally:
            impatience.cancel()
            if job is not None:
                job.lost(conn)
                if job.unused and self._jobs.get(job.name) is job:  # several connections may end at once
                    self._drop(job)

    def _hello(self, text: str, connection: Connection) -> m.Hello | None:
        """Reads the first message of a connection. An invalid hello is refused with the reason, or the replica would
        send it again. Checks the protocol first: the other fields may be those of another protocol."""
        try:
            said = m.protocol_of(text)
            if said is None or said[1] == m.PROTOCOL:
                hello = m.from_replica(text)
                if not isinstance(hello, m.Hello):
                    raise m.MessageError("the first message of a connection must be a hello")
                return filled(hello, self._start_replicas)
            refusal = m.Refuse("misfit", other_protocol(said[0][: limits.MAX_NAME], said[1]))
        except m.MessageError as error:
            refusal = m.Refuse("unreadable", f"the coordinator cannot read the hello: {error}")
        self._refused["message"] += 1
        _log.warning("a hello is refused: %s", ascii(refusal.reason)[:300])
        connection.send(m.encode(refusal))
        connection.close()
        return None

    def _job(self, name: str) -> Job:
        """The job ``name``. When there are too many jobs, a new one replaces one that has ended, else one without a
        connection."""
        if name in self._jobs:
            return self._jobs[name]
        if len(self._jobs) >= self._limits.jobs:
            unconnected = (job for job in self._jobs.values() if not job.connected)
            idle = min(unconnected, key=lambda job: not job.ended, default=None)
            if idle is None:
                raise Exceeded(f"more than {self._limits.jobs} jobs")
            self._drop(idle)
        self._remembered.pop(name, None)
        since_s = -math.inf if self._new else self._began_s
        self._jobs[name] = Job(
            name, self._journal, self._on_event, limits=self._limits, reachable_s=since_s, trace=self._trace
        )
        for replica in self._given_up:
            self._jobs[name].give_up(replica)
        return self._jobs[name]

    def _drop(self, job: Job) -> None:
        """Forgets a job; its entries in the journal stay."""
        job.close()
        del self._jobs[job.name]


async def _page(_: web.Request) -> web.Response:
    body, headers = page()
    return web.Response(body=body, headers=headers)
