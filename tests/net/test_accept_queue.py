"""Connections that wait to be admitted: real sockets, and protocols that are turned away before they are connected."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import pytest

from ftopt.net.accept_queue import AcceptQueue


class Open(asyncio.Protocol):
    """A protocol as aiohttp's: it has its transport while it is connected, and no place for further attributes."""

    __slots__ = ("transport",)
    all: ClassVar[set[Open]] = set()

    def __init__(self) -> None:
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        Open.all.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        Open.all.discard(self)


class Aborted:
    def __init__(self) -> None:
        self.times = 0

    def abort(self) -> None:
        self.times += 1


async def _until(true: Any) -> None:
    async with asyncio.timeout(60.0):
        while not true():
            await asyncio.sleep(0.01)


async def _burst() -> None:
    Open.all.clear()
    queue = AcceptQueue(Open, limit=8, patience_s=600.0)
    server = await asyncio.get_running_loop().create_server(queue, "127.0.0.1", 0, backlog=200)
    port = server.sockets[0].getsockname()[1]
    opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(200)))
    await _until(lambda: queue.turned_away == 192)
    assert (len(queue), len(Open.all)) == (8, 8)
    assert not queue._doomed
    for _, writer in opened:
        writer.close()
    await _until(lambda: not Open.all)
    assert len(queue) == 0
    server.close()


def test_a_burst_leaves_no_more_connections_than_the_limit() -> None:
    asyncio.run(_burst())


async def _one_after_the_other() -> None:
    queue = AcceptQueue(Open, limit=4, patience_s=600.0)
    server = await asyncio.get_running_loop().create_server(queue, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await _until(lambda: len(queue) == 0 and not Open.all)
    assert queue.turned_away == 0
    server.close()


def test_connections_that_have_ended_do_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(_one_after_the_other())
    assert caplog.text == ""


async def _before_it_is_connected() -> None:
    Open.all.clear()
    queue = AcceptQueue(Open, limit=1, patience_s=600.0)
    first, second = queue(), queue()  # as two connections whose TLS handshakes have not ended
    late, there = Aborted(), Aborted()
    first.connection_made(late)  # type: ignore[arg-type]
    second.connection_made(there)  # type: ignore[arg-type]
    assert (late.times, there.times, len(queue)) == (1, 0, 1)
    assert isinstance(second, Open)
    queue.close()
    assert there.times == 1
    never = queue()
    queue.close()
    assert list(queue._doomed) == [never]
    for timer in queue._doomed.values():
        timer.cancel()


def test_one_that_is_turned_away_before_it_is_connected_is_closed_when_it_is() -> None:
    asyncio.run(_before_it_is_connected())
