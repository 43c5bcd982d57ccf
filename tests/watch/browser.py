"""Headless Chromium for tests, by the DevTools protocol: open a page, evaluate JavaScript, take a picture."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

_START_S = 60.0
_ANSWER_S = 60.0


def find() -> str | None:
    """The path of a Chromium; None: there is none here."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Page:
    """One tab. ``errors``: what its console has reported, refusals by the Content-Security-Policy included; without
    requests that fail: the page of a test before may still ask its coordinator."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.errors: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        answer = await self._ask(method, **params)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._answers[number], _ANSWER_S)

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """What an expression is."""
        answer = await self.send("Runtime.evaluate", **_expression(script))
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str, limit_s: float = 60.0) -> None:
        """Waits until an expression is true; while a page loads it may fail, also for want of a page."""
        answer: dict[str, Any] = {}
        try:
            async with asyncio.timeout(limit_s):
                while answer.get("result", {}).get("result", {}).get("value") is not True:
                    if answer:
                        await asyncio.sleep(0.05)
                    answer = await self._ask("Runtime.evaluate", **_expression(script))
        except TimeoutError:
            raise AssertionError(f"{script} did not come true ({answer}); the page: {await self.text()}") from None

    async def text(self, what: str = "document.body") -> str:
        return str(await self.value(f"{what}.innerText"))

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """What fits into the window, as a PNG."""
        answer = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            got = json.loads(message.data)
            if (waiting := self._answers.pop(got.get("id", 0), None)) is not None:
                waiting.set_result(got)
            elif got.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(got["params"]["exceptionDetails"]))
            elif got.get("method") == "Log.entryAdded":
                entry = got["params"]["entry"]
                if entry["level"] == "error" and not entry["text"].startswith("Failed to load resource"):
                    self.errors.append(entry["text"])


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A tab of a Chromium of its own, which is gone when the block ends."""
    path = find()
    assert path is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars",            "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
            stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await asyncio.wait_for(_port(Path(folder) / "DevToolsActivePort"), _START_S)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    (tab, *_) = [x for x in await answer.json() if x["type"] == "page"]
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    yield page
                    page._reader.cancel()
        finally:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


def _expression(script: str) -> dict[str, Any]:
    return {"expression": script, "returnByValue": True, "awaitPromise": True}


async def _port(path: Path) -> int:
    while not path.is_file() or "\n" not in (text := path.read_text(encoding="ascii")):
        await asyncio.sleep(0.05)
    return int(text.splitlines()[0])
