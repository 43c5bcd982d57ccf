"""Which requests may be a foreign web page's: none of an honest client is taken for one."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from ftopt.cli.main import main
from ftopt.net.browsers import from_a_page
from tests.sync.server.access import coordinator, coordinator_thread, identity, scripted, status, touchstone

PAGES: list[dict[str, str]] = [
    {"Host": "127.0.0.1:29410", "Origin": "http://evil.example"},
    {"Host": "127.0.0.1:29410", "Origin": "null"},
    {"Host": "localhost:29410", "Origin": "http://localhost:8080"},
    {"Host": "127.0.0.1:29410", "Origin": "http://[evil"},
    {"Host": "evil.example:29410", "Origin": "http://evil.example:29410"},
    {"Host": "evil.example:29410"},
    {"Host": "EVIL.example."},
    {"Host": "127.0.0.1.evil.example:29410"},
    {"Host": "localhost.evil.example"},
]
HONEST = ["127.0.0.1:29410", "10.0.0.7:29410", "[::1]:29410", "[fd00::7]:1", "localhost:29410", "head:29410", "head",
          "job.localhost:1", "head.example.com:29410", f"{socket.gethostname()}:29410"]  # fmt: skip


@pytest.mark.parametrize("headers", PAGES)
@pytest.mark.parametrize("connects", [False, True])
def test_a_page_is_known(headers: dict[str, str], connects: bool) -> None:
    assert from_a_page(headers, host="127.0.0.1", connects=connects)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_client_is_not_taken_for_a_page(name: str) -> None:
    assert not from_a_page({"Host": name}, host="head.example.com")
    assert not from_a_page({"Host": name, "Origin": f"http://{name}"}, host="head.example.com")  # the live page's own
    assert not from_a_page({"Host": name}, host="0.0.0.0", connects=True)


def test_beyond_loopback_a_replica_may_use_any_name_of_the_machine() -> None:
    assert not from_a_page({"Host": "head.cluster.example:29410"}, host="0.0.0.0", connects=True)
    assert from_a_page({"Host": "head.cluster.example:29410"}, host="0.0.0.0")
    assert from_a_page({"Host": "head.cluster.example", "Origin": "http://x"}, host="0.0.0.0", connects=True)


async def _pages() -> None:
    async with coordinator(token=None) as url, touchstone(url, token=None), aiohttp.ClientSession() as session:
        for headers in PAGES[:7]:
            given = {name: value for name, value in headers.items() if name == "Origin" or "evil" in value.lower()}
            for path in ("/", "/status", "/live", "/metrics"):
                async with session.get(f"{url}{path}", headers=given) as answer:
                    assert answer.status == 403 and "s0" not in await answer.text()
            with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                await session.ws_connect(f"{url}/connect", headers=given)
        code, text = await status(url, token=None)
        assert code == 200 and "s0" in text
        async with scripted(url.replace("127.0.0.1", "localhost"), identity("other"), token=None) as replica:
            await replica.join()


def test_without_a_token_a_page_neither_joins_nor_reads() -> None:
    asyncio.run(_pages())


def test_status_by_a_name_that_may_be_a_pages_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: real("127.0.0.1" if host == "a.example" else host, *rest, **more),
    )
    with coordinator_thread(token=None) as url:
        assert main(["status", url.replace("127.0.0.1", "a.example")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "answers 403" in said and "use this machine's address" in said
