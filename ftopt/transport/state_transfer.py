"""Fetching a state from several peers at once.

`fetch` takes parts from all peers that show the same ETag; the part of a peer that dies or stalls goes to another.
Received data is not trusted before its digest is checked: sizes are bounded before memory is allocated, headers
before they are parsed, and a source that answers anything else is dropped. Data is copied once, to its final place.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp
from torch import Tensor

from ftopt.common.printable import printable
from ftopt.net.tls import Tls
from ftopt.net.token import authorization, for_state
from ftopt.transport.interface import Meta, Provider, SourceBusy
from ftopt.transport.snapshot import Arriving
from ftopt.transport.state_server import StateServer

_PROBE_BYTES = 64 << 10
"""Bytes that the first request of a fetch asks for: all of a small state, the header of a large one."""
_PART_BYTES = 16 << 20
_SPLIT_BYTES = 8 << 20
"""From this size on a state is fetched from several sources at once."""
_ASK = 3
"""How often a source is asked which version it holds, at most."""
_SLOWEST_BYTES_S = 16 << 10
"""Bytes per second, apart from the time-out, below which a source is dropped: it could trickle forever."""
_HEAD_BYTES = 16 << 20
"""A larger safetensors header is refused: it has about 100 bytes per tensor, and is parsed in one go."""
_MOST_CHARS = 300
"""Of a source's own words in an error."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


class _SourceFailed(Exception):
    """One source did not send the bytes that it was asked for; the message says what it answered."""


class _Busy(_SourceFailed):
    """The source cannot read its state at the moment."""


class _OtherVersion(_SourceFailed):
    """The source answers, but no longer holds the requested version."""


@dataclass
class _Body:
    """The state being assembled: parts are taken from ``todo``."""

    etag: str
    size: int
    state: Arriving
    todo: list[tuple[int, int]] = field(default_factory=list)
    missing: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


async def fetch(
    urls: Sequence[str],
    what: str,
    *,
    token: str | None,
    timeout_s: float,
    expect: Callable[[Meta], None] | None = None,
    max_bytes: int = 1 << 36,
    tls: ssl.SSLContext | None = None,
) -> tuple[Meta, dict[str, Tensor]]:
    """Fetches a state from whichever of ``urls`` hold it.

    The first source that answers defines the version. From 8 MiB on, the others send parts of it as well, if
    they hold the same version. Smaller states come from one source, and the others replace it if it fails.

    Args:
        urls: base URLs of the peers, ``http://host:port`` or ``https://``, the preferred one first.
        what: ``state/0`` for the committed state of fragment 0, ``copy/r1`` for the copy of replica r1.
        token: what the servers ask for, or None.
        timeout_s: seconds without a byte after which a source is dropped.
        expect: called with the metadata of a source's version before the rest is fetched; raises ValueError
            to refuse that source (too old, another chain).
        max_bytes: a larger state is refused. Default 64 GiB.
        tls: which CAs to trust at ``https://``. Default: the system's.

    Returns:
        metadata and tensors; each tensor is contiguous and owns its memory.

    Raises:
        ConnectionError: no source gave the state; the message says what each one answered. `SourceBusy`: one of them
            has it, but waits for its training thread.
    """
    answers, busy = list[str](), False
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
    headers = {"Accept-Encoding": "identity"} | authorization(token)
    tcp = aiohttp.TCPConnector(ssl=tls if tls is not None else True)
    async with aiohttp.ClientSession(connector=tcp, timeout=timeout, headers=headers, auto_decompress=False) as session:
        sources = [_Source(session, url, what, max_bytes=max_bytes, timeout_s=timeout_s) for url in urls]
        # A source that has moved on to another version is asked again.
        while live := [source for source in sources if not source.failed and source.asked < _ASK]:
            try:
                body = await live[0].begin(expect)
                await _fill(body, live, answers)
                if not body.missing:
                    return body.state.meta, body.state.tensors
            except (_SourceFailed, ValueError) as error:
                live[0].failed, busy = True, busy or isinstance(error, _Busy)
                answers.append(f"{live[0].url}: {error}")
    told = "; ".join(dict.fromkeys(answers)) or "there was no source to ask"
    raise (SourceBusy if busy else ConnectionError)(f"{what} could not be fetched: {told}")


async def _fill(body: _Body, sources: Sequence[_Source], answers: list[str]) -> None:
    """Fetches the missing parts of ``body``, which ``sources[0]`` began.

    ``body.missing`` stays above 0 when no source that holds the version is left.
    """

    async def work(source: _Source, *, known: bool) -> None:
        try:
            if not known:
                await source.confirm(body)
            while True:
                async with body.changed:  # until all parts are here, other sources may give theirs back
                    await body.changed.wait_for(lambda: body.todo or not body.missing)
                    if not body.todo:
                        return
                    part = body.todo.pop(0)
                try:
                    await source.part(*part, body)
                except _SourceFailed:
                    async with body.changed:
                        body.todo.append(part)
                        body.changed.notify_all()
                    raise
                async with body.changed:
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


class _Source:
    """One peer of a fetch."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, what: str, *, max_bytes: int, timeout_s: float
    ) -> None:
        self.url = url.rstrip("/")
        self.asked = 0
        self.failed = False
        self._session = session
        self._state = f"{self.url}/{quote(what)}"
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def begin(self, expect: Callable[[Meta], None] | None) -> _Body:
        """Asks for the current version; the body has the first bytes, and the rest as ``todo``."""
        self.asked += 1
        data = bytearray()
        etag, size = await self._get(0, _PROBE_BYTES, data.extend)
        head = int.from_bytes(data[:8], "little") + 8
        if not 8 <= head <= size:
            raise _SourceFailed("sent no safetensors header")
        if head > _HEAD_BYTES:
            raise _SourceFailed(f"has a header of {head} bytes; at most {_HEAD_BYTES} are taken")
        if head > len(data):
            await self._get(len(data), head, data.extend, etag=etag, size=size)
        body = _Body(etag=etag, size=size, state=Arriving(bytes(data), size))
        if expect is not None:
            try:
                expect(dict(body.state.meta))
            except ValueError as error:
                raise _SourceFailed(f"refused: {error}") from error
        body.todo = [(at, min(at + _PART_BYTES, size)) for at in range(len(data), size, _PART_BYTES)]
        body.missing = len(body.todo)
        return body

    async def confirm(self, body: _Body) -> None:
        """Raises `_OtherVersion` unless this source holds the version of ``body``."""
        self.asked += 1
        etag, size = await self._get(0, 8, lambda data: None)
        if (etag, size) != (body.etag, body.size):
            raise _OtherVersion("holds another version")

    async def part(self, start: int, stop: int, body: _Body) -> None:
        """Fetches these bytes into ``body``."""
        at = start

        def take(data: bytes) -> None:
            nonlocal at
            body.state.write(at, data)
            at += len(data)

        await self._get(start, stop, take, etag=body.etag, size=body.size)

    async def _get(
        self, start: int, stop: int, take: Callable[[bytes], None], *, etag: str | None = None, size: int | None = None
    ) -> tuple[str, int]:
        """Passes these bytes, or fewer if the body ends before, to ``take``; returns ETag and size of the whole body.

        With ``etag`` and ``size`` given, any other body is refused.
        """
        headers = {"Range": f"bytes={start}-{stop - 1}"} | ({"If-Match": etag} if etag else {})
        limit_s = self._timeout_s + (stop - start) / _SLOWEST_BYTES_S
        request = self._session.get(self._state, headers=headers, allow_redirects=False)
        try:
            async with asyncio.timeout(limit_s), request as response:
                if response.status == 412:
                    raise _OtherVersion("holds another version by now")
                if response.status != 206:
                    text = (await response.content.read(200)).decode("utf-8", "replace").strip()
                    failed = _Busy if "Retry-After" in response.headers else _SourceFailed
                    raise failed(printable(f"{response.status} {response.reason}: {text}", _MOST_CHARS))
                told = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
                if told is None or int(told[1]) != start or "ETag" not in response.headers:
                    raise _SourceFailed("answered a range request without Content-Range or ETag")
                last, whole = int(told[2]), int(told[3])
                if whole > self._max_bytes:
                    raise _SourceFailed(f"holds {whole} bytes; at most {self._max_bytes} are taken")
                if last != min(stop, whole) - 1:
                    raise _SourceFailed(f"answered with bytes up to {last} of {whole}, asked for {stop - 1}")
                got = response.headers["ETag"]
                if size is not None and (got, whole) != (etag, size):
                    raise _SourceFailed("sent other bytes than asked for")
                left = last + 1 - start
                async for chunk in response.content.iter_any():
                    left -= len(chunk)
                    if left < 0:
                        raise _SourceFailed("sent more bytes than told")
                    take(chunk)
                if left:
                    raise _SourceFailed(f"broke off {left} bytes before the end")
                return got, whole
        except TimeoutError as error:
            raise _SourceFailed(f"no byte in time ({str(error) or 'timeout'})") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _SourceFailed(printable(f"{type(error).__name__}: {error}", _MOST_CHARS)) from error


class HttpState:
    """States over HTTP: serves this replica's, and fetches the others'.

    Args:
        host: this machine's address, as peers reach it.
        token: the job's token; replicas show each other a key derived from it.
        tls: with a certificate, the state is served over TLS; its ``ca`` is trusted when peers do so.
    """

    def __init__(self, host: str, token: str | None, tls: Tls | None = None) -> None:
        tls = tls or Tls()
        self._host = host
        self._token = for_state(token)
        self._serves = tls.server()
        self._trusts = tls.client() if tls.ca is not None else None  # the system's CAs take 40 ms: only if needed
        self._server: StateServer | None = None

    async def start(self, provider: Provider, on_serve: Callable[[str, Meta], None]) -> str:
        self._server = StateServer(provider, token=self._token, host=self._host, on_serve=on_serve, tls=self._serves)
        port = await self._server.start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._serves is None else 'https'}://{host}:{port}"

    async def fetch(
        self, sources: Sequence[str], what: str, *, timeout_s: float, expect: Callable[[Meta], None]
    ) -> tuple[Meta, Mapping[str, Tensor]]:
        return await fetch(sources, what, token=self._token, timeout_s=timeout_s, expect=expect, tls=self._trusts)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
