"""A network that can be cut: what goes between a process and the coordinator passes through a relay of this process.

A cut is silent, in both directions or in one: what is sent stays on its way, and arrives when the cut has ended, as
with TCP over a link that is down for a moment. Or it is loud: connections are reset, new ones too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

CUTS = ("both", "from it", "to it", "loud")


class Link:
    """One relay: a port, and whatever is connected to it. All but `port` belongs to the loop's thread."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._pairs: set[asyncio.Task[None]] = set()
        self._gates = {"from it": asyncio.Event(), "to it": asyncio.Event()}
        self._loud = False
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        for gate in self._gates.values():
            gate.set()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self, how: str) -> None:
        """``how``: of `CUTS`."""
        if how == "loud":
            self._loud = True
            for writer in self._writers:
                _reset(writer)
        for way, gate in self._gates.items():
            if how in ("both", way):
                gate.clear()

    def mend(self) -> None:
        self._loud = False
        for gate in self._gates.values():
            gate.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            _reset(writer)
        for task in self._pairs:
            task.cancel()
        await asyncio.gather(*self._pairs, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pairs.add(task)
        try:
            await self._relay(reader, writer)
        except (OSError, asyncio.CancelledError):
            _reset(writer)
        finally:
            self._pairs.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._loud:
            raise ConnectionResetError
        await self._gates["from it"].wait()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, far_writer}
        if self._loud:  # meanwhile
            _reset(far_writer)
            raise ConnectionResetError
        pumps = [
            asyncio.ensure_future(_pump(reader, far_writer, self._gates["from it"])),
            asyncio.ensure_future(_pump(far_reader, writer, self._gates["to it"])),
        ]
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (writer, far_writer):
                self._writers.discard(end)
                end.close()


class Relays:
    """All links to a coordinator at ``port``, on a thread of their own."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._links: list[Link] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._thread.start()

    def open(self) -> Link:
        """A new link."""

        async def made() -> Link:
            link = Link(self._target)
            await link.open()
            return link

        link = asyncio.run_coroutine_threadsafe(made(), self._loop).result()
        self._links.append(link)
        return link

    def cut(self, link: Link, how: str) -> None:
        self._call(link.cut, how)

    def mend(self, link: Link) -> None:
        self._call(link.mend)

    def close(self) -> None:
        for link in self._links:
            asyncio.run_coroutine_threadsafe(link.close(), self._loop).result()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()  # transports close in a callback
        self._call(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    """Bytes one way, until that way ends: a connection that is reset ends both."""
    while data := await reader.read(1 << 16):
        await gate.wait()
        writer.write(data)
        await writer.drain()
    await gate.wait()
    with contextlib.suppress(OSError):
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection as a host does that is gone: not in good order."""
    if (sock := writer.get_extra_info("socket")) is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
