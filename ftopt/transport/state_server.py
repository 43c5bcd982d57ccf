"""Serving states to peers: safetensors over HTTP, by ranges, while the replica trains on.

`StateServer` runs in a replica's network loop and serves what ``provider`` returns. The body is sent straight
from the tensors' memory: nothing is serialized, copied or hashed, only the header is written. Equal states give
bit-equal bodies and equal ETags on every peer (an ETag is a hash of the header, and so of version, chain and
digest in ``meta``). A version that a peer is fetching is kept while the replica moves on.

HTTP surface (``Authorization: Bearer TOKEN`` when the server has a token, else 401; without one, a web page gets 403):

    GET /ping               200 ``ok``
    GET /state/{fragment}   the committed state: 200 whole body; 206 with ``Range: bytes=a-b``; 412 when
                            ``If-Match`` names a version that is not kept; 404 unknown fragment; 416 range outside;
                            503 not there yet; with ``Retry-After: 0``: busy, ask again at once
    GET /copy/{replica}     the copy of this replica, or of a neighbour, at the start of its round; answers as above
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web
from torch import Tensor

from ftopt.net.accept_queue import AcceptQueue
from ftopt.net.browsers import from_a_page
from ftopt.net.http import guarded, quiet
from ftopt.net.tls import HANDSHAKE_S
from ftopt.net.token import admits
from ftopt.transport.interface import Busy, Meta, Provider
from ftopt.transport.snapshot import StateImage

_KEEP = 2
_HELD_S = 5.0
"""A version is kept, as one being fetched, until this many seconds after a part of it was sent."""
_IDLE_S = 30.0
_WAITING = 64
"""Connections that have not shown the token yet; beyond this number the oldest is closed."""
_PATIENCE_S = 10.0
"""Seconds within which a connection must show the token."""


class StateServer:
    """Serves a replica's committed state to its peers, in the running asyncio loop.

    Args:
        provider: name (``state/0``, ``copy/r1``) -> the current ``(meta, tensors)``. Awaited on the loop's thread;
            raises KeyError for what never exists, LookupError for what does not exist yet, and `Busy`. The
            tensors are never changed from then on. ``meta`` names the state (version, chain, digest, ...):
            equal on all peers that hold the same state, unequal for different states.
        token: what a request must bring; None: any process may fetch.
        host: address to listen on, at a free port.
        on_serve: called with the name asked for and ``meta`` when a serve begins: at a request that names no version.
            On the loop's thread.
        tls: certificate and key to serve with; None: without TLS.

    At most two versions of each name are kept, besides those being sent or between two parts (5 s). None is kept for
    longer than 30 s after it was last asked for.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        token: str | None,
        host: str,
        on_serve: Callable[[str, Meta], None] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._provider = provider
        self._tls = tls
        self._token = token
        self._host = host
        self._on_serve = on_serve
        self._kept: dict[str, dict[str, StateImage]] = {}
        self._room: AcceptQueue | None = None
        self._started = AsyncExitStack()

    async def start(self) -> int:
        """Starts to listen; returns the port.

        Raises:
            OSError: the address cannot be listened on.
        """
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/ping", self._ping, allow_head=False)
        app.router.add_get(r"/{what:state/\d{1,9}|copy/.{1,128}}", self._state, allow_head=False)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet(__name__),
            handler_cancellation=True,
            shutdown_timeout=0.1,
            keepalive_timeout=_IDLE_S,
            auto_decompress=False,
        )
        await runner.setup()
        self._started.push_async_callback(runner.cleanup)
        self._room = AcceptQueue(guarded(runner), limit=_WAITING, patience_s=_PATIENCE_S)
        handshake_s = HANDSHAKE_S if self._tls is not None else None
        try:
            server = await asyncio.get_running_loop().create_server(
                self._room, self._host, 0, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
        except OSError:
            await self.stop()
            raise
        self._started.callback(self._room.close)
        self._started.callback(server.close)
        sweep = asyncio.create_task(self._forget_idle())
        sweep.add_done_callback(_raise)
        self._started.push_async_callback(asyncio.wait, [sweep])
        self._started.callback(sweep.cancel)
        return int(server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops listening, and breaks off transfers under way. Idempotent."""
        await self._started.aclose()
        self._kept.clear()

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not admits(self._token, request.headers.get("Authorization", "")):
            refusal = web.HTTPUnauthorized(text="wrong or missing token", headers={"WWW-Authenticate": "Bearer"})
            refusal.force_close()
            raise refusal
        if self._token is None and (why := from_a_page(request.headers, host=self._host)):
            forbidden = web.HTTPForbidden(text=f"refused: {why}")
            forbidden.force_close()
            raise forbidden
        assert self._room is not None
        self._room.let_in(request.transport)
        return await handler(request)

    async def _ping(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    async def _state(self, request: web.Request) -> web.StreamResponse:
        what = request.match_info["what"]
        wanted = request.headers.get("If-Match")
        snapshot = self._kept.get(what, {}).get(wanted) if wanted else None
        if snapshot is None:
            snapshot = await self._current(what)
            if wanted and snapshot.etag != wanted:
                raise web.HTTPPreconditionFailed(text="another version", headers={"ETag": snapshot.etag})
        if not wanted and self._on_serve is not None:
            self._on_serve(what, dict(snapshot.meta))
        start, stop = _range_of(request, snapshot.size)
        response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        response.headers.update({"ETag": snapshot.etag, "Accept-Ranges": "bytes"})
        if response.status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{snapshot.size}"
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        snapshot.readers += 1
        try:
            await response.prepare(request)
            for chunk in snapshot.chunks(start, stop):
                async with asyncio.timeout(_IDLE_S):  # a hanging reader must not pin a version
                    await response.write(chunk)
            await response.write_eof()
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            snapshot.readers -= 1
            snapshot.asked_s = time.monotonic()
        return response

    async def _current(self, what: str) -> StateImage:
        try:
            meta, tensors = await self._provider(what)
        except KeyError:
            raise web.HTTPNotFound(text=f"no {what}") from None
        except Busy as error:
            raise web.HTTPServiceUnavailable(text=str(error), headers={"Retry-After": "0"}) from None
        except LookupError as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from None
        # On another thread: tensors on a device or not contiguous are copied, and others are gathered from several
        # processes.
        copied = asyncio.ensure_future(asyncio.to_thread(_image, meta, tensors))
        copied.add_done_callback(_raise)
        fresh = await copied
        if isinstance(fresh, LookupError):
            raise web.HTTPServiceUnavailable(text=str(fresh))
        kept = self._kept.setdefault(what, {})
        snapshot = kept.setdefault(fresh.etag, fresh)
        snapshot.asked_s = now_s = time.monotonic()
        idle = ((old.asked_s, etag) for etag, old in kept.items() if not old.readers)
        resting = sorted(x for x in idle if x[0] < now_s - _HELD_S or x[1] == snapshot.etag)
        for _, etag in resting[:-_KEEP]:
            del kept[etag]
        return snapshot

    async def _forget_idle(self) -> None:
        while True:
            await asyncio.sleep(_IDLE_S / 4)
            for kept in self._kept.values():
                for etag, old in list(kept.items()):
                    if not old.readers and time.monotonic() - old.asked_s > _IDLE_S:
                        del kept[etag]


def _image(meta: Meta, tensors: Mapping[str, Tensor]) -> StateImage | LookupError:
    """The state's image; a LookupError is returned if the state no longer exists when its tensors are read."""
    try:
        return StateImage(meta, tensors)
    except KeyError:
        raise
    except LookupError as error:
        return error


def _raise(task: asyncio.Future[Any]) -> None:
    """Raises a task's error in a callback: a peer sees only a server error, but the fault is this replica's, and the
    loop reports it to the training thread."""
    if not task.cancelled():
        task.result()


def _range_of(request: web.Request, size: int) -> tuple[int, int]:
    try:
        asked = request.http_range
    except ValueError:
        asked = None
    if asked is not None:
        start, stop, _ = asked.indices(size)
        if start < stop:
            return start, stop
    raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
