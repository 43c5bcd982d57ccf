"""The state transfer's reader against sources that mean harm, and its server behind TLS and a closed door."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch

from ftopt.net.tls import Tls
from ftopt.transport import state_server, state_transfer
from ftopt.transport.interface import Meta
from ftopt.transport.snapshot import StateImage
from tests.sync.server.access import Certificates, no_errors_logged

from .test_state_transfer import arrived, get, same, serving, state

Answer = Callable[[bytes], list[bytes]]
"""Request in, pieces of the answer out."""


@asynccontextmanager
async def a_source(answer: Answer, pause_s: float = 0.0) -> AsyncIterator[str]:
    """A server that answers each request with whatever ``answer`` says; an empty piece ends the connection."""
    writers: list[asyncio.StreamWriter] = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                for piece in answer(await reader.readuntil(b"\r\n\r\n")):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
                    if not piece:
                        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def head(size: int, *, start: int = 0, stop: int | None = None, etag: str = '"a"', of: int | None = None) -> bytes:
    """The head of an answer to a range request."""
    stop = size if stop is None else stop
    total = size if of is None else of
    return (
        f"HTTP/1.1 206 Partial Content\r\nETag: {etag}\r\nContent-Length: {stop - start}\r\n"
        f"Content-Range: bytes {start}-{stop - 1}/{total}\r\n\r\n"
    ).encode()


def whole(body: bytes) -> Answer:
    """Serves a small body whole."""
    return lambda request: [head(len(body)), body]


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(**options: object) -> dict[str, object]:
    return {"__metadata__": {}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | options}


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\x01\x02",
    "a header beyond the body": (1 << 60).to_bytes(8, "little") + b"{}",
    "a header nested deeply": safetensors(b"[" * 60_000),
    "an object nested deeply": safetensors(b'{"a":' * 10_000),
    "a header that is no object": safetensors([1, 2]),
    "a header that is no text": safetensors(b"\xff\xfe\x00"),
    "metadata that is no object": safetensors({"__metadata__": 5}),
    "an unknown dtype": safetensors(tensor(dtype="F99"), bytes(4)),
    "a dtype that torch lacks": safetensors(tensor(dtype="F8_E8M0", shape=[4]), bytes(4)),
    "a negative shape": safetensors(tensor(shape=[-1]), bytes(4)),
    "a huge shape": safetensors(tensor(shape=[1 << 62, 1 << 62]), bytes(4)),
    "offsets outside": safetensors(tensor(data_offsets=[0, 400]), bytes(4)),
    "offsets backwards": safetensors(tensor(data_offsets=[4, 0]), bytes(4)),
    "bytes to spare": safetensors(tensor(), bytes(40)),
    "tensors that overlap": safetensors(tensor() | {"b": tensor()["a"]}, bytes(4)),
    "a gap between tensors": safetensors(
        {"a": tensor()["a"], "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}, bytes(12)
    ),
    "a shape of other bytes": safetensors(tensor(shape=[2]), bytes(4)),
    "more dimensions than torch has": safetensors(tensor(shape=[1] * 1000), bytes(4)),
    "a shape of no bytes that overflows": safetensors(
        {"a": {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]}}
    ),
    "true for a length": safetensors(tensor(shape=[True]), bytes(4)),
    "a number for a name": safetensors({"__metadata__": {}, "a": 5}),
    "a huge number": safetensors(b'{"__metadata__":{},"a":' + b"9" * 5000 + b"}"),
}


async def _refused(answer: Answer, *, pause_s: float = 0.0, **options: float) -> str:
    async with a_source(answer, pause_s) as url:
        with pytest.raises(ConnectionError) as refusal:
            await get([url], **({"timeout_s": 5.0} | options))
    return str(refusal.value)


@pytest.mark.long
@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_state_is_refused(name: str) -> None:
    with no_errors_logged():
        told = asyncio.run(_refused(whole(BODIES[name])))
    assert "could not be fetched" in told
    assert len(told) < 1000
    gc.collect()


def endless(request: bytes) -> list[bytes]:
    return [b'HTTP/1.1 206 x\r\nETag: "a"\r\nContent-Range: bytes 0-9/10\r\n\r\n', *[bytes(1 << 16)] * 100]


def endless_head(request: bytes) -> list[bytes]:
    return [b"HTTP/1.1 206 x\r\n", *[b"X-%d: y\r\n" % i for i in range(10_000)]]


def drips(request: bytes) -> list[bytes]:
    return [head(60_000), *[b"x"] * 60_000]


def other_version(request: bytes) -> list[bytes]:
    text = json.dumps({"a": {"dtype": "U8", "shape": [(4 << 20) - 108], "data_offsets": [0, (4 << 20) - 108]}})
    body = safetensors(text.ljust(100).encode())
    if b"If-Match" in request:
        return [head(4 << 20, start=65536, stop=(4 << 20), etag='"b"'), bytes((4 << 20) - 65536)]
    return [head(4 << 20, stop=65536), body + bytes(65536 - len(body))]


def a_large_header(request: bytes) -> list[bytes]:
    return [head(1 << 30, stop=65536, of=1 << 30), (1 << 29).to_bytes(8, "little") + bytes(65528)]


def an_evil_etag(request: bytes) -> list[bytes]:
    evil = '"\u00e4\udcff"\tX'.encode("utf-8", "surrogatepass").decode("latin-1")
    return [head(4 << 20, stop=65536, etag=evil), bytes(65536)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless, "more bytes than told"),
        (endless_head, "ClientResponseError|ServerDisconnected|LineTooLong|header"),
        (other_version, "other bytes than asked for|sent"),
        (a_large_header, "at most 16777216 are taken"),
        (an_evil_etag, "fetched"),
        (lambda request: [b"HTTP/1.1 206 x\r\nContent-Length: 0\r\n\r\n"], "without Content-Range"),
        (lambda request: [head(10, stop=10, of=5), bytes(10)], "answered with bytes"),
        (lambda request: [head(10, start=3, stop=10), bytes(7)], "without Content-Range"),
        (lambda request: [head(100), bytes(10), b""], "ClientPayloadError"),
        (lambda request: [b"HTTP/1.1 200 x\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08"], "200"),
    ],
)
def test_a_source_that_answers_wrongly_is_left(answer: Answer, words: str) -> None:
    with no_errors_logged():
        told = asyncio.run(_refused(answer))
    assert any(word in told for word in words.split("|")), told
    gc.collect()


def test_a_source_that_drips_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "_SLOWEST_BYTES_S", 1 << 20)
    told = asyncio.run(_refused(drips, pause_s=0.02, timeout_s=0.3))
    assert "no byte in time" in told


async def _mixed() -> None:
    meta, tensors = state(numel=3_000_000)
    async with a_source(whole(BODIES["a huge shape"])) as liar, serving(lambda _: (meta, tensors)) as (url, _):
        got_meta, got = await get([liar, url])
    assert got_meta == meta
    assert same(got, tensors)


def test_a_liar_is_left_for_an_honest_source() -> None:
    with no_errors_logged():
        asyncio.run(_mixed())


def damage(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed, cut out or put in, mostly in the header."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = min(chance.randrange(len(data) + 1), chance.choice((9, 400, 1 << 20)))
        match chance.randrange(4):
            case 0:
                data = data[:at] + chance.randbytes(1) + data[at + 1 :]
            case 1:
                data = data[:at] + data[at + chance.randrange(20) :]
            case 2:
                data = (
                    data[:at]
                    + chance.choice((b"9" * 30, b"-1", b"[[[[", b'"', b"\\ud800", b"F8_E8M0", b"\xff"))
                    + data[at:]
                )
            case _:
                data = chance.randrange(1 << 10).to_bytes(8, "little") + data[8:]
    return data


def feed_the_reader(count: int, chance: random.Random) -> None:
    meta, tensors = {"record": "{}", "digest": "d"}, {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.int64)}
    snapshot = StateImage(meta, tensors)
    good = b"".join(snapshot.chunks(0, snapshot.size))
    for _ in range(count):
        data = damage(good, chance)
        try:
            arrived(data)
        except ValueError:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} for {data!r}") from error


def test_damaged_bodies_are_read_or_refused(chance: random.Random) -> None:
    feed_the_reader(5_000, chance)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_damaged_bodies_are_read_or_refused(chance: random.Random) -> None:
    feed_the_reader(1_000_000, chance)


async def _random_answers(count: int, chance: random.Random) -> None:
    meta, tensors = state(numel=20_000)
    snapshot = StateImage(meta, tensors)
    body = b"".join(snapshot.chunks(0, snapshot.size))

    def answer(request: bytes) -> list[bytes]:
        first, _, last = request.partition(b"Range: bytes=")[2].split(b"\r\n")[0].partition(b"-")
        start, stop = int(first), min(int(last) + 1, len(body))
        honest = head(len(body), start=start, stop=stop) + body[start:stop]
        return [damage(honest, chance) if chance.random() < 0.7 else honest, b"" if chance.random() < 0.5 else b"\r\n"]

    async with a_source(answer) as url:
        for _ in range(count):
            with contextlib.suppress(ConnectionError):
                got_meta, got = await get([url, url], timeout_s=0.3)
                assert set(got) <= set(tensors) | set(got_meta) | set(got)


@pytest.mark.slow
def test_a_source_of_random_answers_is_read_or_left(chance: random.Random) -> None:
    with no_errors_logged():
        asyncio.run(_random_answers(60, chance))
    gc.collect()


async def _tls(certificates: Certificates) -> None:
    cert, key = certificates.make("replica")
    tls = Tls(cert=cert, key=key, ca=certificates.ca)
    meta, tensors = state(numel=3_000_000)
    async with serving(lambda _: (meta, tensors), tls=tls.server()) as (url, _):
        url = url.replace("http://", "https://")
        got_meta, got = await get([url], tls=tls.client())
        assert got_meta == meta
        assert same(got, tensors)
        for options, words in (
            ({"tls": None}, "certificate verify failed"),
            ({"tls": tls.client(), "token": "wrong"}, "401"),
        ):
            with pytest.raises(ConnectionError, match=words):
                await get([url], **options)
        with pytest.raises(ConnectionError):
            await get([url.replace("https://", "http://")], timeout_s=1.0)


def test_a_state_comes_over_tls_from_who_has_the_certificate(tmp_path_factory: pytest.TempPathFactory) -> None:
    with no_errors_logged():
        asyncio.run(_tls(Certificates(tmp_path_factory.mktemp("certificates"))))
    gc.collect()


async def _closed_door() -> None:
    meta, tensors = state()
    asked: list[Meta] = []
    async with serving(lambda _: (meta, tensors), on_serve=lambda _, meta: asked.append(meta)) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(80)]
        for path in (b"/state/0", b"/ping", b"/nothing", b"/state/99999"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n")
            got = await reader.read()  # to its end: a guess costs a connection
            assert b" 401 " in got
            assert b"\r\n\r\nwrong or missing token" in got
            writer.close()
        assert not asked
        assert (await get([url]))[0] == meta
        async with asyncio.timeout(60):
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()


def test_who_shows_no_token_gets_no_state_and_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_server, "_PATIENCE_S", 2.0)
    with no_errors_logged():
        asyncio.run(_closed_door())


def test_a_sources_words_are_one_line_without_control_characters() -> None:
    body = b"\x1b[31mRED\x1b]0;PWNED\x07\nreplica r9: forged\x00\xe2\x80\xae rtl"

    async def ask() -> str:
        said = b"HTTP/1.1 200 O\x1bK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        async with a_source(lambda request: [said]) as url:
            with pytest.raises(Exception) as caught:
                await get([url])
        return str(caught.value)

    text = asyncio.run(ask())
    assert text.isprintable(), text
    assert len(text) < 1000
