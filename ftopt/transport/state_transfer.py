"""The committed state on its way to a newcomer: safetensors over HTTP, by ranges, from several peers at once.

`StateServer` runs in a replica's network loop and hands out what ``provider`` holds, while the replica trains
on. The body is sent straight from the tensors' memory: nothing is serialized, copied or hashed, only the
header is written. Equal states give bit-equal bodies on every peer, and the ETag (a hash of the header, thus
of version, chain and digest in ``meta``) says so. `fetch` takes parts from all peers that show the same ETag;
a peer that dies or stalls gives its part back. A version that somebody is fetching is kept though the replica
moves on.

HTTP surface (``Authorization: Bearer TOKEN`` when the server has a token, else 401):

    GET /ping               200 ``ok``
    GET /state/{fragment}   200 whole body; 206 with ``Range: bytes=a-b``; 412 when ``If-Match`` names a
                            version that is not kept;
                            404 unknown fragment; 416 range outside; 503 no committed state yet
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from torch import Tensor

from ftopt.transport.snapshot import Meta, Snapshot, decode, meta_of

Provider = Callable[[int], tuple[Meta, Mapping[str, Tensor]]]

_PROBE_BYTES = 64 << 10
"""The first request of a fetch asks for this much: all of a small state, the header of a large one."""
_PART_BYTES = 4 << 20
_SPLIT_BYTES = 8 << 20
"""From this size on a state is fetched from several sources at once."""
_ASK = 3
"""Times that a source is asked which version it holds."""
_KEEP = 2
_IDLE_S = 30.0


class StateServer:
    """Serves a replica's committed state to its peers, in the running asyncio loop.

    Args:
        provider: fragment -> ``(meta, tensors)``, the current state. Called on the loop's thread, must not
            block; raises KeyError for an unknown fragment, LookupError while there is no committed state. The
            tensors are never changed from then on. ``meta`` names the state (version, chain, digest, ...):
            equal on all peers that hold the same state, unequal for different states.
        token: what a request must bring; None: anybody may fetch.
        host: address to listen on.
        port: port to listen on; 0 (default): a free one.
        on_serve: called with fragment and meta when a serve begins: at a request that names no version. On
            the loop's thread.

    At most two versions a fragment are kept, besides those being sent at the moment; none for longer than 30
    s after it was last asked for.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        token: str | None,
        host: str,
        port: int = 0,
        on_serve: Callable[[int, Meta], None] | None = None,
    ) -> None:
        self._provider = provider
        self._token = token
        self._host = host
        self._port = port
        self._on_serve = on_serve
        self._kept: dict[int, dict[str, Snapshot]] = {}
        self._runner: web.AppRunner | None = None
        self._sweep: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Starts to listen; returns the port.

        Raises:
            OSError: the address cannot be listened on.
        """
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/ping", self._ping, allow_head=False)
        app.router.add_get(r"/state/{fragment:\d{1,9}}", self._state, allow_head=False)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        self._sweep = asyncio.create_task(self._forget_idle())
        return int(runner.addresses[0][1])

    async def stop(self) -> None:
        """Stops listening, and breaks off what is being sent. Idempotent."""
        sweep, self._sweep = self._sweep, None
        runner, self._runner = self._runner, None
        if sweep is not None:
            sweep.cancel()
            await asyncio.gather(sweep, return_exceptions=True)
        if runner is not None:
            await runner.cleanup()
        self._kept.clear()

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._token is not None:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                raise web.HTTPUnauthorized(text="wrong or missing token", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def _ping(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    async def _state(self, request: web.Request) -> web.StreamResponse:
        fragment = int(request.match_info["fragment"])
        wanted = request.headers.get("If-Match")
        snapshot = self._kept.get(fragment, {}).get(wanted) if wanted else None
        if snapshot is None:
            snapshot = await self._current(fragment)
            if wanted and snapshot.etag != wanted:
                raise web.HTTPPreconditionFailed(text="another version", headers={"ETag": snapshot.etag})
        if not wanted and self._on_serve is not None:
            self._on_serve(fragment, dict(snapshot.meta))
        start, stop = _range_of(request, snapshot.size)
        response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        response.headers.update({"ETag": snapshot.etag, "Accept-Ranges": "bytes"})
        if response.status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{snapshot.size}"
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        with _reading(snapshot):
            await response.prepare(request)
            try:
                for chunk in snapshot.chunks(start, stop):
                    async with asyncio.timeout(_IDLE_S):  # a hanging reader must not pin a version
                        await response.write(chunk)
                await response.write_eof()
            except (TimeoutError, ConnectionError):
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def _current(self, fragment: int) -> Snapshot:
        try:
            meta, tensors = self._provider(fragment)
        except KeyError:
            raise web.HTTPNotFound(text=f"no fragment {fragment}") from None
        except LookupError:
            raise web.HTTPServiceUnavailable(text="no committed state yet") from None
        # On another thread: a tensor on a device or a non-contiguous one is copied.
        fresh = await asyncio.to_thread(Snapshot, meta, tensors)
        kept = self._kept.setdefault(fragment, {})
        snapshot = kept.setdefault(fresh.etag, fresh)
        snapshot.asked_s = time.monotonic()
        resting = sorted((old.asked_s, etag) for etag, old in kept.items() if not old.readers)
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


@contextmanager
def _reading(snapshot: Snapshot) -> Iterator[None]:
    snapshot.readers += 1
    try:
        yield
    finally:
        snapshot.readers -= 1
        snapshot.asked_s = time.monotonic()


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


class _SourceFailed(Exception):
    """What one source answered instead of the bytes that were asked for."""


class _OtherVersion(_SourceFailed):
    """The source lives, but no longer holds the version that was asked for."""


@dataclass
class _Body:
    """The state being put together: parts are taken from ``todo`` and land in ``done``, by offset."""

    etag: str
    size: int
    done: dict[int, bytes] = field(default_factory=dict)
    todo: list[tuple[int, int]] = field(default_factory=list)
    missing: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


async def fetch(
    urls: Sequence[str],
    fragment: int,
    *,
    token: str | None,
    timeout_s: float,
    expect: Callable[[Meta], None] | None = None,
    max_bytes: int = 1 << 36,
) -> tuple[Meta, dict[str, Tensor]]:
    """Fetches a fragment's committed state from whichever of ``urls`` hold it.

    The first source that answers defines the version. From 8 MiB on the others send parts of it as well, if
    theirs is the same; otherwise they stand by for when it fails.

    Args:
        urls: base URLs of the peers, ``http://host:port``, the preferred one first.
        fragment: the fragment.
        token: what the servers ask for, or None.
        timeout_s: seconds without a byte after which a source is given up.
        expect: called with the metadata of a source's version before the rest is fetched; raises ValueError
            to refuse that source (too old, another chain).
        max_bytes: a larger state is refused. Default 64 GiB.

    Returns:
        metadata and tensors; each tensor is contiguous and owns its memory.

    Raises:
        ConnectionError: no source gave it; the message says what each one answered.
    """
    answers: list[str] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, auto_decompress=False) as session:
        sources = [_Source(session, url, fragment, max_bytes) for url in urls]
        # One that has moved on to another version is asked anew.
        while live := [source for source in sources if not source.failed and source.asked < _ASK]:
            try:
                body = await live[0].begin(expect)
                await _fill(body, live, answers)
                if not body.missing:
                    parts = [body.done.pop(at) for at in sorted(body.done)]
                    return await asyncio.to_thread(decode, parts)
            except (_SourceFailed, ValueError) as error:
                live[0].failed = True
                answers.append(f"{live[0].url}: {error}")
    told = "; ".join(dict.fromkeys(answers)) or "there was no source to ask"
    raise ConnectionError(f"the state of fragment {fragment} could not be fetched: {told}")


async def _fill(body: _Body, sources: Sequence[_Source], answers: list[str]) -> None:
    """Fetches what is missing of ``body``, which ``sources[0]`` began.

    ``body.missing`` stays above 0 when no source that holds the version is left.
    """

    async def work(source: _Source, *, known: bool) -> None:
        try:
            if not known:
                await source.confirm(body)
            while (part := await _next_part(body)) is not None:
                try:
                    data = await source.part(*part, etag=body.etag, size=body.size)
                except _SourceFailed:
                    async with body.changed:
                        body.todo.append(part)
                        body.changed.notify_all()
                    raise
                async with body.changed:
                    body.done[part[0]] = data
                    body.missing -= 1
                    body.changed.notify_all()
        except _OtherVersion as error:
            answers.append(f"{source.url}: {error}")
        except _SourceFailed as error:
            source.failed = True
            answers.append(f"{source.url}: {error}")

    waiting = list(sources[1:])
    tasks = {asyncio.create_task(work(sources[0], known=True))}
    try:
        while body.missing and (tasks or waiting):
            while waiting and (body.size >= _SPLIT_BYTES or not tasks):
                tasks.add(asyncio.create_task(work(waiting.pop(0), known=False)))
            ended, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next_part(body: _Body) -> tuple[int, int] | None:
    """A part to fetch; waits while others may still give theirs back; None when all are there."""
    async with body.changed:
        await body.changed.wait_for(lambda: body.todo or not body.missing)
        return body.todo.pop(0) if body.todo else None


class _Source:
    """One peer, as a fetch sees it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, fragment: int, max_bytes: int) -> None:
        self.url = url.rstrip("/")
        self.asked = 0
        self.failed = False
        self._session = session
        self._state = f"{self.url}/state/{fragment}"
        self._max_bytes = max_bytes

    async def begin(self, expect: Callable[[Meta], None] | None) -> _Body:
        """Asks for the current version; the body has the first bytes, and the rest to do."""
        self.asked += 1
        data, etag, size = await self._get(0, _PROBE_BYTES)
        body = _Body(etag=etag, size=size, done={0: data})
        head = int.from_bytes(data[:8], "little") + 8
        if not 8 <= head <= size:
            raise _SourceFailed("sent no safetensors header")
        if head > len(data):
            body.done[len(data)] = await self.part(len(data), head, etag=etag, size=size)
        if expect is not None:
            try:
                expect(meta_of(b"".join(body.done.values())))
            except ValueError as error:
                raise _SourceFailed(f"refused: {error}") from error
        start = sum(map(len, body.done.values()))
        body.todo = [(at, min(at + _PART_BYTES, size)) for at in range(start, size, _PART_BYTES)]
        body.missing = len(body.todo)
        return body

    async def confirm(self, body: _Body) -> None:
        """Begins with this source, too, if it holds the version of ``body``."""
        self.asked += 1
        _, etag, size = await self._get(0, 8)
        if (etag, size) != (body.etag, body.size):
            raise _OtherVersion("holds another version")

    async def part(self, start: int, stop: int, *, etag: str, size: int) -> bytes:
        data, got_etag, got_size = await self._get(start, stop, etag=etag)
        if (len(data), got_etag, got_size) != (stop - start, etag, size):
            raise _SourceFailed("sent other bytes than asked for")
        return data

    async def _get(self, start: int, stop: int, *, etag: str | None = None) -> tuple[bytes, str, int]:
        headers = {"Range": f"bytes={start}-{stop - 1}"} | ({"If-Match": etag} if etag else {})
        try:
            async with self._session.get(self._state, headers=headers, allow_redirects=False) as response:
                if response.status == 412:
                    raise _OtherVersion("holds another version by now")
                if response.status != 206:
                    text = (await response.content.read(200)).decode("utf-8", "replace").strip()
                    raise _SourceFailed(f"{response.status} {response.reason}: {text}")
                told = re.fullmatch(
                    r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", response.headers.get("Content-Range", "")
                )
                if told is None or int(told[1]) != start or "ETag" not in response.headers:
                    raise _SourceFailed("answered a range request without Content-Range or ETag")
                last, size = int(told[2]), int(told[3])
                if size > self._max_bytes:
                    raise _SourceFailed(f"holds {size} bytes; at most {self._max_bytes} are taken")
                if last != min(stop, size) - 1:
                    raise _SourceFailed(f"answered with bytes up to {last} of {size}, asked for {stop - 1}")
                data = bytearray()
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > last + 1 - start:
                        raise _SourceFailed("sent more bytes than told")
                if len(data) != last + 1 - start:
                    raise _SourceFailed(f"broke off after {len(data)} of {last + 1 - start} bytes")
                return bytes(data), response.headers["ETag"], size
        except TimeoutError as error:
            raise _SourceFailed(f"no byte in time ({error or 'timeout'})") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _SourceFailed(f"{type(error).__name__}: {error}") from error
