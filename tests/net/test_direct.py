"""Whatever proxy the environment names: ftopt's own requests go directly, and their token to nobody else."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ftopt.cli.main import main
from ftopt.sync.replica.websocket import WebSocketLink
from ftopt.transport.state_server import StateServer
from ftopt.transport.state_transfer import fetch
from tests.sync.server.access import TOKEN, coordinator, coordinator_thread
from tests.transport.test_state_transfer import at_once, same, state

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@contextmanager
def elsewhere(*, location: str = "") -> Iterator[tuple[str, list[str]]]:
    """A server that refuses each request, or sends it on to ``location``; its address, and the requests it got."""
    asked: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers['Authorization']}")
            self.send_response(302 if location else 403)
            self.send_header("Location", location)
            self.end_headers()

        do_CONNECT = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The environment names a proxy in every way; what it is asked for."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with elsewhere() as (url, asked):
        for name in PROXIES:
            monkeypatch.setenv(name, url)
            monkeypatch.setenv(name.upper(), url)
        yield asked


def test_status_asks_no_proxy(
    proxy: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTOPT_TOKEN", TOKEN)
    with coordinator_thread(token=TOKEN) as url:
        assert main(["status", url]) == 0
    assert "no jobs yet" in capsys.readouterr().out
    assert proxy == []


def test_replicas_ask_no_proxy(proxy: list[str]) -> None:
    async def run() -> None:
        async with coordinator(token=TOKEN) as url:
            link = WebSocketLink(url, token=TOKEN, dead_after_s=2.0)
            await (await link.open(lambda text: None)).close()
            await link.end()
        meta, tensors = state(numel=10)
        server = StateServer(at_once(lambda _: (meta, tensors)), host="127.0.0.1", token=TOKEN)
        port = await server.start()
        try:
            _, got = await fetch([f"http://127.0.0.1:{port}"], "state/0", token=TOKEN, timeout_s=20.0)
        finally:
            await server.stop()
        assert same(got, tensors)

    asyncio.run(run())
    assert proxy == []


def test_status_takes_its_token_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FTOPT_TOKEN", TOKEN)
    with elsewhere() as (other, asked), elsewhere(location=f"{other}/status") as (url, _):
        assert main(["status", url]) == 2
    assert "answers 302" in capsys.readouterr().err
    assert asked == []
