"""State transfer over real loopback sockets; a source that dies is a real process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import pytest
import safetensors.torch
import torch
from torch import Tensor

from ftopt.transport import state_server
from ftopt.transport.interface import Busy, Meta, Provider, SourceBusy
from ftopt.transport.snapshot import Arriving, StateImage
from ftopt.transport.state_server import StateServer
from ftopt.transport.state_transfer import fetch

from .helpers import members

TOKEN = "s3cret"


def state(version: int = 1, numel: int = 1000) -> tuple[Meta, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(version)
    meta = {"version": str(version), "chain": f"c{version}", "counted": "r0/1=20", "ä": "\u2028"}
    return meta, {
        "anchor": torch.randn(numel, generator=generator),
        "half": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(version),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
        "turned": torch.randn(4, 5, generator=generator).t(),
    }


def arrived(body: bytes, *, pieces: int = 1) -> Arriving:
    """A body that has come whole, in pieces, the last one first."""
    begin = 8 + int.from_bytes(body[:8], "little")
    arriving = Arriving(body[:begin], len(body))
    step = max(1, -(-(len(body) - begin) // pieces))
    for at in reversed(range(begin, len(body), step)):
        arriving.write(at, body[at : at + step])
    return arriving


def same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name], tensor) for name, tensor in expected.items()
    )


def at_once(provide: Callable[[str], tuple[Meta, Mapping[str, Tensor]]]) -> Provider:
    """A provider that has nothing to wait for."""

    async def provider(what: str) -> tuple[Meta, Mapping[str, Tensor]]:
        return provide(what)

    return provider


@asynccontextmanager
async def serving(provider: Any, **options: Any) -> AsyncIterator[tuple[str, StateServer]]:
    server = StateServer(at_once(provider), token=options.pop("token", TOKEN), host="127.0.0.1", **options)
    port = await server.start()
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        await server.stop()


async def get(urls: list[str], **options: Any) -> tuple[Meta, dict[str, Tensor]]:
    settings: dict[str, Any] = {"token": TOKEN, "timeout_s": 20.0} | options
    return await fetch(urls, "state/0", **settings)


def test_a_snapshot_is_valid_safetensors_and_bit_equal_whatever_the_order() -> None:
    meta, tensors = state()
    snapshot = StateImage(meta, tensors)
    body = b"".join(snapshot.chunks(0, snapshot.size))
    assert len(body) == snapshot.size
    assert same(safetensors.torch.load(body), tensors)
    turned = StateImage(dict(reversed(meta.items())), dict(reversed(tensors.items())))
    assert turned.etag == snapshot.etag
    assert b"".join(turned.chunks(0, turned.size)) == body
    assert b"".join(snapshot.chunks(100, 3000)) == body[100:3000]
    for pieces in (1, 3, 17, len(body)):
        arriving = arrived(body, pieces=pieces)
        assert arriving.meta == meta
        assert same(arriving.tensors, tensors)
    assert StateImage(meta | {"version": "2"}, tensors).etag != snapshot.etag


def test_a_snapshot_of_contiguous_tensors_copies_nothing() -> None:
    tensor = torch.zeros(4)
    snapshot = StateImage({}, {"a": tensor})
    tensor.fill_(1.0)
    assert arrived(b"".join(snapshot.chunks(0, snapshot.size))).tensors["a"].tolist() == [1.0] * 4


async def _fetch_one(numel: int) -> None:
    meta, tensors = state(numel=numel)
    served = []
    async with serving(lambda _: (meta, tensors), on_serve=lambda *told: served.append(told)) as (url, _):
        got_meta, got = await get([url])
    assert got_meta == meta
    assert same(got, tensors)
    assert all(tensor.is_contiguous() for tensor in got.values())
    assert served == [("state/0", meta)]
    got["anchor"].zero_()
    assert torch.count_nonzero(tensors["anchor"])


@pytest.mark.parametrize("numel", [10, 100_000, 5_000_000])
def test_a_state_comes_as_it_was(numel: int) -> None:
    asyncio.run(_fetch_one(numel))


async def _ranges() -> None:
    meta, tensors = state()
    snapshot = StateImage(meta, tensors)
    body = b"".join(snapshot.chunks(0, snapshot.size))
    async with serving(lambda _: (meta, tensors), token=None) as (url, _), aiohttp.ClientSession(url) as session:
        async with session.get("/ping") as response:
            assert await response.text() == "ok"
        async with session.get("/state/0") as response:
            assert (response.status, await response.read()) == (200, body)
            etag = response.headers["ETag"]
        for asked, start, stop in (("0-0", 0, 1), ("5-99", 5, 100), ("100-", 100, None), ("-7", -7, None)):
            headers = {"Range": f"bytes={asked}", "If-Match": etag}
            async with session.get("/state/0", headers=headers) as response:
                assert (response.status, await response.read()) == (206, body[start:stop])
        for headers, status in (
            ({"Range": f"bytes={len(body)}-"}, 416),
            ({"Range": "bytes=9-3"}, 416),
            ({"Range": "lines=1-2"}, 416),
            ({"If-Match": '"other"'}, 412),
        ):
            async with session.get("/state/0", headers=headers) as response:
                assert response.status == status
        async with session.get("/state/x") as response:
            assert response.status == 404


def test_ranges_and_versions_are_answered_as_http_says() -> None:
    asyncio.run(_ranges())


async def _busy() -> None:
    meta, tensors = state()

    def busy(what: str) -> tuple[Meta, dict[str, Tensor]]:
        raise Busy("its training thread is elsewhere")

    def early(what: str) -> tuple[Meta, dict[str, Tensor]]:
        raise LookupError("no committed state yet")

    async with (
        serving(busy) as (first, _),
        serving(early) as (second, _),
        serving(lambda _: (meta, tensors)) as (third, _),
    ):
        with pytest.raises(SourceBusy, match=r"its training thread is elsewhere.*no committed state yet"):
            await get([first, second])
        got, _ = await get([first, second, third])
        assert got == meta


def test_who_asks_busy_sources_alone_is_to_ask_again_at_once() -> None:
    asyncio.run(_busy())


async def _refusals() -> None:
    meta, tensors = state()

    def missing(what: str) -> tuple[Meta, dict[str, Tensor]]:
        raise KeyError(what)

    def early(what: str) -> tuple[Meta, dict[str, Tensor]]:
        raise LookupError("no committed state yet")

    def old(meta: Meta) -> None:
        raise ValueError(f"version {meta['version']} is too old")

    async with (
        serving(lambda _: (meta, tensors)) as (url, _),
        serving(missing) as (no_fragment, _),
        serving(early) as (no_state, _),
    ):
        for options, words in (
            ({"token": "wrong"}, "401"),
            ({"token": None}, "401"),
            ({"max_bytes": 100}, "at most 100 are taken"),
            ({"expect": old}, "version 1 is too old"),
        ):
            with pytest.raises(ConnectionError, match=words):
                await get([url], **options)
        with pytest.raises(ConnectionError, match=r"404.*no state.0.*; .*503.*no committed state yet"):
            await get([no_fragment, no_state])
        with pytest.raises(ConnectionError, match="no source to ask"):
            await get([])
        assert same((await get(["http://127.0.0.1:1", no_fragment, url]))[1], tensors)


def test_what_cannot_be_fetched_says_what_each_source_answered() -> None:
    asyncio.run(_refusals())


async def _two_sources() -> None:
    meta, tensors = state(numel=8_000_000)
    served = []
    async with (
        serving(lambda _: (meta, tensors), on_serve=lambda *_: served.append("a")) as (first, _),
        serving(lambda _: (dict(meta), dict(tensors)), on_serve=lambda *_: served.append("b")) as (second, _),
        serving(lambda _: state(2), on_serve=lambda *_: served.append("other")) as (other, _),
    ):
        got_meta, got = await get([first, second, other])
    assert got_meta == meta
    assert same(got, tensors)
    assert sorted(served) == ["a", "b", "other"]


def test_a_large_state_comes_from_all_sources_that_hold_it() -> None:
    asyncio.run(_two_sources())


async def _moving() -> None:
    """The source commits at every request: ranges still come from the version that was begun."""
    states = [state(version, 3_000_000) for version in range(4)]
    asked = 0

    def provider(what: str) -> tuple[Meta, dict[str, Tensor]]:
        nonlocal asked
        asked += 1
        return states[min(asked, 3)]

    async with serving(provider) as (url, server), aiohttp.ClientSession(url) as session:
        headers = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=0-99"}
        async with session.get("/state/0", headers=headers) as response:
            begun = response.headers["ETag"]
        meta, tensors = await get([url])
        assert meta == states[2][0]
        assert same(tensors, states[2][1])
        async with session.get("/state/0", headers=headers | {"If-Match": begun}) as response:
            assert response.status == 206
        await get([url])
        assert len(server._kept["state/0"]) == 2  # the oldest is gone
        async with session.get("/state/0", headers=headers | {"If-Match": '"gone"'}) as response:
            assert response.status == 412


def test_a_version_being_served_outlives_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_server, "_HELD_S", 0.0)
    asyncio.run(_moving())


async def _slow_rounds() -> None:
    """Newcomers begin at four versions, one after the other, and go on with them in turns."""
    now: list[tuple[Meta, dict[str, Tensor]]] = []
    async with serving(lambda _: now[-1]) as (url, _), aiohttp.ClientSession(url) as session:
        headers, begun = {"Authorization": f"Bearer {TOKEN}"}, []
        for version in range(4):
            now.append(state(version))
            async with session.get("/state/0", headers=headers | {"Range": "bytes=0-99"}) as response:
                begun.append(response.headers["ETag"])
        for start in (100, 200):
            for etag in begun:
                more = {"Range": f"bytes={start}-{start + 99}", "If-Match": etag}
                async with session.get("/state/0", headers=headers | more) as response:
                    assert response.status == 206


def test_all_versions_that_are_being_fetched_are_kept() -> None:
    asyncio.run(_slow_rounds())


async def _lost_version() -> None:
    """A source that has dropped the version in mid-fetch is asked anew for its current one."""
    version = 1
    async with serving(lambda _: state(version, 3_000_000)) as (url, server):

        def commit(meta: Meta) -> None:
            nonlocal version
            if version == 1:
                version = 2
                server._kept.clear()

        meta, tensors = await get([url], expect=commit)
    assert meta["version"] == "2"
    assert same(tensors, state(2, 3_000_000)[1])


def test_a_version_lost_in_mid_fetch_is_begun_anew() -> None:
    asyncio.run(_lost_version())


def serve_in_process(pipe: Connection, rank: int, size: int) -> None:
    async def run() -> None:
        meta, tensors = state(numel=12_000_000)
        server = StateServer(at_once(lambda _: (meta, tensors)), token=TOKEN, host="127.0.0.1")
        pipe.send(await server.start())
        await asyncio.Event().wait()

    asyncio.run(run())


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_source_that_dies_or_stalls_in_mid_transfer_is_replaced(how: str) -> None:
    with members(2, serve_in_process) as started:
        urls = [f"http://127.0.0.1:{member.receive()}" for member in started]
        victim = started[0].process

        def strike(meta: Meta) -> None:
            if how == "kill":
                victim.kill()
                victim.join()
            else:
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGSTOP)

        # Told as soon as the header has come: the first source never gets to send the rest.
        timeout_s = 30.0 if how == "kill" else 3.0  # without a byte, also of the second source
        meta, tensors = asyncio.run(get(urls, expect=strike, timeout_s=timeout_s))
        assert same(tensors, state(numel=12_000_000)[1])
        assert meta["version"] == "1"


async def _liars() -> None:
    head = b'HTTP/1.1 206 x\r\nETag: "a"\r\n'
    answers = {
        "short": head + b"Content-Length: 900\r\nContent-Range: bytes 0-899/900\r\n\r\nabc",
        "header": head + b"Content-Length: 9\r\nContent-Range: bytes 0-8/9\r\n\r\n" + b"\xff" * 8 + b"1",
        "more": head + b"Content-Range: bytes 0-8/9\r\n\r\n" + b"x" * 20,
        "json": head + b"Content-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\n\x02\0\0\0\0\0\0\0[]",
        "moved": b"HTTP/1.1 302 x\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        "noise": b"hello\r\n\r\n",
    }
    words = {"short": "ClientPayloadError", "header": "no safetensors header", "more": "more bytes than told"}
    words |= {"json": "safetensors", "moved": "302", "noise": "Bad status line"}
    for name, answer in answers.items():

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes = answer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(ConnectionError, match=words[name]):
                await get([f"http://127.0.0.1:{port}"])


def test_broken_and_lying_sources_are_refused() -> None:
    asyncio.run(_liars())
    gc.collect()


async def _timely() -> None:
    meta, tensors = state(numel=25_000_000)
    gaps = []

    async def heartbeat() -> None:
        last_s = time.process_time()  # that of the machine goes on while others have its cores
        while True:
            await asyncio.sleep(0.005)
            now_s = time.process_time()
            gaps.append(now_s - last_s)
            last_s = now_s

    async with serving(lambda _: (meta, tensors)) as (url, _):
        beat = asyncio.create_task(heartbeat())
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(url) as session, session.get("/state/0", headers=headers) as response:
            async for _ in response.content.iter_any():
                pass
        beat.cancel()
    assert len(gaps) > 5
    assert max(gaps) < 0.5


def test_serving_leaves_the_loop_free_for_heartbeats() -> None:
    asyncio.run(_timely())


class _Moving(Mapping[str, Tensor]):
    """Tensors that are brought together when they are read, and are not there at first."""

    reads = 0

    def _there(self) -> dict[str, Tensor]:
        _Moving.reads += 1
        if _Moving.reads == 1:
            raise LookupError("a newer state takes effect at the next step boundary")
        return state()[1]

    def __getitem__(self, name: str) -> Tensor:
        return self._there()[name]

    def __iter__(self) -> Any:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())


def test_tensors_that_are_not_there_when_they_are_read_are_not_there_yet() -> None:
    errors: list[Any] = []

    async def run() -> Mapping[str, Tensor]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        async with serving(lambda what: (state()[0], _Moving())) as (url, _):
            with pytest.raises(ConnectionError, match=r"503.*a newer state takes effect"):
                await get([url])
            return (await get([url]))[1]

    assert same(asyncio.run(run()), state()[1])
    assert not errors
