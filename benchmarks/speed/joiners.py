"""Sixteen joiners at once: how long all of them take, and how the load is spread over those that serve the state."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from torch import Tensor

from benchmarks.speed.crew import together
from benchmarks.speed.figures import QUICK_REPETITIONS, Row, Spread
from ftopt.sync.protocol.coordinator.roster.roster import Roster
from ftopt.sync.protocol.values import Position
from ftopt.transport.state_server import StateServer
from ftopt.transport.state_transfer import fetch

SOURCES, JOINERS = 8, 16
MILLION = 1_000_000
LINK = 25e6
"""Bytes per second that a source sends."""
REPETITIONS = 3
ABOUT = (
    "Eight replicas hold a state of 80 MB (10M parameters and their momentum), and 16 joiners fetch it at the same "
    "moment, each from the four sources that the coordinator names. All are processes of their own, and a source sends "
    "25 MB/s, as over a link of 200 Mbit/s. *the first four*: each joiner is sent to the same ones. *in turn*: the "
    "coordinator goes on to the next holder for each. *all done*: from the start until the last joiner has the state. "
    "*ideal*: all bytes over all links. *most to mean*: bytes sent by the busiest source, to the mean of all eight."
)
GOALS = "in turn: all done within 1.3 times the ideal, most to mean below 1.2"
DRAWN = "all done, s"


def run(quick: bool) -> list[Row]:
    """A row a way of naming sources."""
    elements, repetitions = (MILLION, QUICK_REPETITIONS) if quick else (10 * MILLION, REPETITIONS)
    found: dict[str, list[tuple[float, list[int]]]] = {"the first four": [], "in turn": []}
    for _ in range(repetitions):
        for way in found:
            found[way].append(_measure(elements, in_turn=way == "in turn"))
    rows: list[Row] = []
    for way, taken in found.items():
        ideal_s = JOINERS * 8 * elements / (SOURCES * LINK)
        rows.append(
            {
                "sources": way,
                "all done, s": Spread.of([seconds for seconds, _ in taken]),
                "to the ideal": Spread.of([seconds / ideal_s for seconds, _ in taken]),
                "most to mean": Spread.of([max(sent) / statistics.mean(sent) for _, sent in taken]),
                "least to mean": Spread.of([min(sent) / statistics.mean(sent) for _, sent in taken]),
            }
        )
    return rows


def _measure(elements: int, *, in_turn: bool) -> tuple[float, list[int]]:
    """Seconds until the last one is done, and the bytes that each source has sent."""
    with tempfile.TemporaryDirectory(prefix="ftopt-bench-") as folder:
        answers = together(_take_part, SOURCES + JOINERS, folder, elements, in_turn)
    fetched = answers[SOURCES:]
    seconds = max(stop for _, stop in fetched) - min(start for start, _ in fetched)
    return seconds, answers[:SOURCES]


def _take_part(rank: int, size: int, folder: str, elements: int, in_turn: bool) -> Any:
    if rank < SOURCES:
        return asyncio.run(_serve(rank, size, Path(folder), elements))
    return asyncio.run(_join(rank, Path(folder), in_turn=in_turn))


class _Link:
    """What a source sends goes through it, `LINK` bytes per second."""

    def __init__(self) -> None:
        self.sent = 0
        self._free_s = 0.0

    async def pass_on(self, size: int) -> None:
        self.sent += size
        now = time.monotonic()
        self._free_s = max(self._free_s, now) + size / LINK
        await asyncio.sleep(self._free_s - now)


async def _serve(rank: int, size: int, folder: Path, elements: int) -> int:
    tensors = {"anchor": torch.full((elements,), 1.0), "momentum": torch.full((elements,), 2.0)}
    link, write = _Link(), web.StreamResponse.write

    async def slow(response: web.StreamResponse, data: Any) -> None:
        for start in range(0, len(data), 1 << 18):
            part = data[start : start + (1 << 18)]
            await link.pass_on(len(part))
            await write(response, part)

    web.StreamResponse.write = slow  # type: ignore[method-assign]

    async def provide(what: str) -> tuple[dict[str, str], Mapping[str, Tensor]]:
        return {"record": "r"}, tensors

    server = StateServer(provide, token=None, host="127.0.0.1")
    port = await server.start()
    _tell(folder / f"source-{rank}", f"http://127.0.0.1:{port}")
    while len(list(folder.glob("done-*"))) < size - SOURCES:
        await asyncio.sleep(0.05)
    await server.stop()
    return link.sent


async def _join(rank: int, folder: Path, *, in_turn: bool) -> tuple[float, float]:
    while len(urls := sorted(folder.glob("source-*"))) < SOURCES:
        await asyncio.sleep(0.02)
    roster, at = Roster(), Position(0, 1, "chain")
    for number, path in enumerate(urls):
        roster.know((path.name, 1), 0.0)
        member = roster.members[path.name]
        member.address, member.held = path.read_text(), {0: at}
        roster.attach(member, number + 1, 0.0)
    _tell(folder / f"ready-{rank}", "")
    while len(list(folder.glob("ready-*"))) < JOINERS:
        await asyncio.sleep(0.02)
    sources = roster.sources(at, but="", turn=rank if in_turn else 0)
    start = time.time()
    await fetch(sources, "state/0", token=None, timeout_s=60.0)
    stop = time.time()
    _tell(folder / f"done-{rank}", "")
    return start, stop


def _tell(path: Path, text: str) -> None:
    """The file is there with its text, or not at all."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.replace(path)
