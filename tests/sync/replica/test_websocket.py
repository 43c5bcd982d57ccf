"""Opening a connection to the coordinator."""

from __future__ import annotations

import asyncio
import socket

import pytest

from ftopt.sync.replica import websocket


def test_the_error_says_that_a_frozen_coordinator_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_ANSWER_S", 0.05)

    async def opens(url: str) -> None:
        link = websocket.WebSocketLink(url, token=None, dead_after_s=3.0)
        try:
            await link.open(lambda _: None)
        finally:
            await link.end()

    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the system accepts; nobody reads
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"^{url}: no answer$"):
            asyncio.run(opens(url))
