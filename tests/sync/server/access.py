"""A coordinator with access control for tests: the real server, scripted replicas on raw WebSockets, certificates."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from ftopt.net.token import authorization
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.effects import Send
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.replica.loop import LoopThread
from ftopt.sync.server.coordinator import CoordinatorServer

TOKEN = "0123456789abcdef0123456789abcdef"
SETTINGS: dict[str, int | float | str | None] = {"start_replicas": 1, "dead_after_s": 300.0, "evict_after_s": 600.0}


def identity(job: str = "job", replica: str = "r0", **options: Any) -> Identity:
    """Whom a scripted replica claims to be."""
    return Identity(
        **{"job": job, "replica": replica, "lines": {"model": "tiny"}, "settings": SETTINGS, "initial": "i"} | options
    )


class Scripted:
    """A replica on a raw WebSocket: the real machine, or whatever text a test wants to send."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, who: Identity) -> None:
        self.socket = socket
        self.machine = Replica(who)

    async def send(self, *messages: m.FromReplica | str) -> None:
        for message in messages:
            await self.socket.send_str(message if isinstance(message, str) else m.encode(message))

    async def receive(self, limit_s: float = 20.0) -> Any:
        """The next message; None once the connection has ended."""
        got = await self.socket.receive(timeout=limit_s)
        return m.decode(got.data) if got.type is aiohttp.WSMsgType.TEXT else None

    async def until(self, kind: type, limit_s: float = 20.0) -> Any:
        """The next message of that kind; the machine hears all of them."""
        while not isinstance(message := await self.receive(limit_s), kind):
            assert message is not None, f"the connection ended before {kind.__name__}"
            self.machine.receive(message)
        self.machine.receive(message)
        return message

    async def ended(self, limit_s: float = 20.0) -> bool:
        """Waits for the end of the connection."""
        while await self.receive(limit_s) is not None:
            pass
        return True

    async def join(self) -> None:
        """Says hello, and waits until it holds the job's first state."""
        for effect in self.machine.connect():
            assert isinstance(effect, Send)
            await self.send(effect.message)
        await self.until(m.Start)

    async def outer_step(self) -> int:
        """Proposes, prepares and waits for the commit, alone; returns the version."""
        record = self.machine.fragments[0].record
        assert record is not None
        last = record.counted_step(self.machine.identity.replica, self.machine.incarnation) + 5
        contribution = m.Contribution(0, record.version, 5, last, 5.0)
        for effect in self.machine.propose(contribution):
            assert isinstance(effect, Send)
            await self.send(effect.message)
        quorum = await self.until(m.Quorum)
        rows = [[last]] * quorum.size
        for effect in self.machine.reduced(0, quorum.attempt, "d", rows):
            assert isinstance(effect, Send)
            await self.send(effect.message)
        commit = await self.until(m.Commit)
        return int(commit.version)


@asynccontextmanager
async def coordinator(*, token: str | None = TOKEN, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """A coordinator's server in this loop; its URL."""
    server = CoordinatorServer("127.0.0.1", port, token=token, **{"new": True, **options})
    taken = await server.start()
    try:
        yield f"{'https' if options.get('tls') else 'http'}://127.0.0.1:{taken}"
    finally:
        await server.stop()


@contextmanager
def coordinator_thread(*, token: str | None = TOKEN, port: int = 0, **options: Any) -> Iterator[str]:
    """The same on a thread of its own, for tests that block."""

    async def start() -> tuple[CoordinatorServer, int]:
        server = CoordinatorServer("127.0.0.1", port, token=token, **{"new": True, **options})
        return server, await server.start()

    network = LoopThread("coordinator")
    server, taken = network.submit(start()).result()
    try:
        yield f"{'https' if options.get('tls') else 'http'}://127.0.0.1:{taken}"
    finally:
        network.submit(server.stop()).result()
        network.stop()


@asynccontextmanager
async def scripted(
    url: str, who: Identity | None = None, *, token: str | None = TOKEN, tls: ssl.SSLContext | bool = True
) -> AsyncIterator[Scripted]:
    """A connection to the coordinator at ``url``."""
    async with (
        aiohttp.ClientSession(headers=authorization(token)) as session,
        session.ws_connect(f"{url}/connect", ssl=tls, max_msg_size=0) as socket,
    ):
        yield Scripted(socket, who or identity())


async def status(url: str, token: str | None = TOKEN, path: str = "/status") -> tuple[int, str]:
    """What ``GET /status``, or another path, answers."""
    async with (
        aiohttp.ClientSession(headers=authorization(token)) as session,
        session.get(f"{url}{path}") as answer,
    ):
        return answer.status, await answer.text()


class Touchstone:
    """A job that others must not touch: one replica that goes on making outer steps."""

    def __init__(self, replica: Scripted) -> None:
        self._replica = replica
        self.version = 0

    async def check(self) -> None:
        """It makes one more outer step, of the next version."""
        async with asyncio.timeout(60):
            assert await self._replica.outer_step() == self.version + 1
        self.version += 1


@asynccontextmanager
async def touchstone(url: str, **options: Any) -> AsyncIterator[Touchstone]:
    """A running job named ``stone``."""
    async with scripted(url, identity("stone", "s0"), **options) as replica:
        await replica.join()
        stone = Touchstone(replica)
        await stone.check()
        yield stone
        await stone.check()


@contextmanager
def no_errors_logged(*, but: str = "nothing") -> Iterator[list[str]]:
    """Fails if an exception that nobody caught was logged: by ftopt, aiohttp or asyncio. Yields the warnings.

    Errors with the text ``but`` are meant to come.
    """
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    keep = Keep()
    loggers = [logging.getLogger(name) for name in ("ftopt", "aiohttp", "asyncio")]
    warnings: list[str] = []
    for logger in loggers:
        logger.addHandler(keep)
    try:
        yield warnings
    finally:
        for logger in loggers:
            logger.removeHandler(keep)
        warnings += [r.getMessage() for r in records if r.levelno == logging.WARNING]
        found = [r for r in records if r.exc_info or (r.levelno >= logging.ERROR and but not in r.getMessage())]
        assert not found, "\n".join(logging.Formatter().format(r) for r in found[:3])


class Certificates:
    """A CA and certificates of it, made by the ``openssl`` program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._openssl("req", "-x509", *self._key("ca"), "-out", self.ca, "-subj", "/CN=test CA", "-days", "2")

    def make(self, name: str, *, host: str = "127.0.0.1", days: int = 2) -> tuple[Path, Path]:
        """A certificate for ``host`` and its key."""
        request, cert = self._folder / f"{name}.csr", self._folder / f"{name}.pem"
        names = f"subjectAltName={'IP' if host[0].isdigit() else 'DNS'}:{host}"
        self._openssl("req", *self._key(name), "-out", request, "-subj", f"/CN={name}", "-addext", names)
        self._openssl(
            "x509", "-req", "-in", request, "-out", cert, "-CA", self.ca, "-CAkey", self._folder / "ca.key",
            "-CAcreateserial", "-copy_extensions", "copyall", "-days", str(days),
        )  # fmt: skip
        return cert, self._folder / f"{name}.key"

    def _key(self, name: str) -> list[str | Path]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        return [*curve, "-keyout", self._folder / f"{name}.key"]

    def _openssl(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
