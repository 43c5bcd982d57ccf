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


def test_one_that_is_cancelled_just_when_its_connection_opens_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the task that keeps the connection goes on, and `close` waits for it in vain."""
    tasks = list[asyncio.Task[None]]()

    class Opens:
        async def ws_connect(self, *_: object, **__: object) -> object:
            tasks[0].cancel()
            return object()

    async def keeps() -> None:
        link = websocket.WebSocketLink("http://127.0.0.1:1", token=None, dead_after_s=3.0)
        link._session = Opens()  # type: ignore[assignment]
        await link.open(lambda _: None)
        await asyncio.Event().wait()

    async def ends() -> None:
        monkeypatch.setattr(websocket, "_WebSocketChannel", lambda *_: None)
        tasks.append(asyncio.create_task(keeps()))
        await asyncio.wait(tasks, timeout=5.0)
        assert tasks[0].cancelled()

    asyncio.run(ends())
