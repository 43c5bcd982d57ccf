"""The coordinator under random input: its parser, its HTTP port, its WebSockets, replicas that lie.

The inputs are `chance`'s (``tests/conftest.py``). What is asked each time: no exception that
nobody caught, no growing memory, and a job beside it that goes on making outer steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ftopt.net.token import authorization
from ftopt.sync.protocol import messages as m

from .access import TOKEN, coordinator, no_errors_logged, scripted, touchstone
from .fuzzing import a_conversation, a_frame, a_request, an_input

CROWD = 50
"""Connections at a time."""


def resident_mb() -> float:
    """Memory of this process by now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def feed_the_parser(count: int, chance: random.Random) -> int:
    """How many of ``count`` inputs were messages that make sense; all others are refused with a `MessageError`."""
    taken = 0
    for i in range(count):
        text = an_input(chance)
        try:
            message = m.from_replica(text)
        except m.MessageError as error:
            assert str(error), text
            assert len(str(error)) < 1000, text
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} for {text!r:.2000}") from error
        else:
            assert m.from_replica(m.encode(message)) == message, text
            taken += 1
        if i == min(count // 10, 20_000):
            before_mb = resident_mb()
    assert resident_mb() - before_mb < 20
    return taken


def test_the_parser_takes_a_message_or_says_what_is_wrong(chance: random.Random) -> None:
    taken = feed_the_parser(5_000, chance)
    assert taken > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_parser_with_a_million_inputs(chance: random.Random) -> None:
    taken = feed_the_parser(1_000_000, chance)
    print(f"{taken} of 1000000 were messages")  # noqa: T201
    assert taken > 20_000


# ---------------------------------------------------------------- HTTP


async def shout(url: str, data: bytes, chance: random.Random, *, stops: float = 0.3, limit_s: float = 0.6) -> bytes:
    """Sends the bytes, in one piece or two, and returns what came back by the end of the connection, or in ``limit_s``.

    ``stops``: how likely it closes its end when all is sent; a server need not answer then.
    """
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    cut, closes = chance.randrange(len(data) + 1), chance.random() < stops
    got = b""
    with contextlib.suppress(OSError):  # also what asyncio says of a connection that has ended
        for piece in (data[:cut], data[cut:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if closes:
            writer.write_eof()
        async with asyncio.timeout(limit_s):
            while piece := await reader.read(1 << 16):
                got += piece
    writer.close()
    return got


async def shout_all(url: str, inputs: list[bytes], chance: random.Random) -> list[bytes]:
    """All of them at once."""
    return await asyncio.gather(*(shout(url, data, chance) for data in inputs))


async def _http(count: int, chance: random.Random) -> None:
    async with coordinator() as url, touchstone(url) as stone:
        for _ in range(count // CROWD):
            inputs = [a_request(chance) for _ in range(CROWD)]
            for data, got in zip(inputs, await shout_all(url, inputs, chance), strict=True):
                if TOKEN.encode() not in data:
                    assert b'"jobs":' not in got, data  # the live page, without data, is anybody's
                    assert b" 101 " not in got, data
            await stone.check()


def test_random_requests_do_not_touch_a_job(chance: random.Random) -> None:
    with no_errors_logged():
        asyncio.run(_http(200, chance))


@pytest.mark.parametrize("request_", [b"CONNECT   \r\n", b"GET /live HTTP/1.1\r\nExpect: \xba\r\n"])
def test_what_ends_the_task_of_aiohttps_connection_is_answered(request_: bytes, chance: random.Random) -> None:
    """What the fuzzer found in aiohttp 3.14: an AttributeError, a UnicodeEncodeError."""

    async def ask() -> bytes:
        async with coordinator() as url:
            return await shout(url, request_ + b"Host: x\r\n\r\n", chance, stops=0, limit_s=30.0)

    with no_errors_logged():
        assert b" 401 " in asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_requests_do_not_touch_a_job(chance: random.Random) -> None:
    with no_errors_logged():
        asyncio.run(_http(20_000, chance))


# ---------------------------------------------------------------- WebSocket frames


async def _frames(count: int, chance: random.Random) -> None:
    upgrade = (
        f"GET /connect HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()
    async with coordinator() as url, touchstone(url) as stone:
        for _ in range(count // CROWD):
            inputs = [
                upgrade + b"".join(a_frame(chance) for _ in range(chance.choice((1, 2, 8)))) for _ in range(CROWD)
            ]
            for got in await shout_all(url, inputs, chance):
                assert got.startswith(b"HTTP/1.1 101") or not got
            await stone.check()


@pytest.mark.long
def test_random_frames_do_not_touch_a_job(chance: random.Random) -> None:
    with no_errors_logged():
        asyncio.run(_frames(300, chance))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_frames_do_not_touch_a_job(chance: random.Random) -> None:
    with no_errors_logged():
        asyncio.run(_frames(20_000, chance))


# ---------------------------------------------------------------- replicas that lie


async def _liars(count: int, chance: random.Random) -> None:
    async with coordinator() as url, touchstone(url) as stone, aiohttp.ClientSession() as session:
        talking: list[Any] = []
        for i in range(count):
            socket = await session.ws_connect(f"{url}/connect", headers=authorization(TOKEN))
            talking.append(socket)
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                for text in a_conversation(f"job{chance.randrange(16)}", chance):
                    await socket.send_str(text)
            if len(talking) > 6:
                await talking.pop(chance.randrange(len(talking))).close()
            if i % 50 == 49:
                await stone.check()
        for socket in talking:
            await socket.close()


def test_lying_replicas_do_not_touch_another_job(chance: random.Random) -> None:
    with no_errors_logged(but="has halted"):
        asyncio.run(_liars(150, chance))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_lying_replicas_do_not_touch_another_job(chance: random.Random) -> None:
    with no_errors_logged(but="has halted"):
        asyncio.run(_liars(20_000, chance))


async def _misfits(chance: random.Random) -> None:
    """Replicas that do not fit a job are refused, whatever else they say; in the job nothing changes."""
    async with coordinator() as url, touchstone(url) as stone:
        for i in range(100):
            texts = a_conversation("stone", chance)
            hello = json.loads(texts[0]) | {"lines": {"model": "another"}, "epoch": chance.choice((0, 1 << 33))}
            async with scripted(url) as replica:
                with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                    await replica.send(json.dumps(hello), *texts[1:])
                got = await replica.receive()
                assert got is None or isinstance(got, m.Refuse)
            if i % 50 == 49:
                await stone.check()


def test_who_does_not_fit_the_job_changes_nothing_in_it(chance: random.Random) -> None:
    with no_errors_logged():
        asyncio.run(_misfits(chance))
