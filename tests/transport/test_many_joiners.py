"""Sixteen joiners at once fetch over HTTP from the sources that the coordinator names: each of eight does its part."""

from __future__ import annotations

import asyncio
from collections import Counter

import torch

from ftopt.sync.protocol.coordinator.roster.roster import Roster
from ftopt.sync.protocol.values import Position
from ftopt.transport.state_server import StateServer
from ftopt.transport.state_transfer import fetch
from tests.transport.test_state_transfer import at_once

SOURCES, JOINERS = 8, 16


async def _all_join() -> Counter[int]:
    """How often each source has begun to serve."""
    weights, at, roster = torch.arange(1000.0), Position(0, 1, "chain"), Roster()
    begun = Counter[int]()
    servers = []
    for i in range(SOURCES):
        server = StateServer(
            at_once(lambda what: ({"record": "r"}, {"anchor": weights})),
            token=None,
            host="127.0.0.1",
            on_serve=lambda what, meta, i=i: begun.update([i]),  # type: ignore[misc]
        )
        servers.append(server)
        roster.know((f"r{i}", 1), 0.0)
        member = roster.members[f"r{i}"]
        member.address, member.held = f"http://127.0.0.1:{await server.start()}", {0: at}
        roster.attach(member, i + 1, 0.0)
    named = [roster.sources(at, but=f"n{turn}", turn=turn) for turn in range(JOINERS)]
    fetched = await asyncio.gather(*(fetch(urls, "state/0", token=None, timeout_s=30.0) for urls in named))
    assert all(torch.equal(tensors["anchor"], weights) for _, tensors in fetched)
    for server in servers:
        await server.stop()
    return begun


def test_sixteen_joiners_load_eight_sources_alike() -> None:
    assert asyncio.run(_all_join()) == dict.fromkeys(range(SOURCES), JOINERS // SOURCES)
