"""Who may come in, and what a stranger or a misbehaving replica may cost: over real sockets, beside a running job."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import aiohttp.web
import pytest

from ftopt.net.token import authorization
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.server import coordinator as coordinator_module
from ftopt.sync.server.limits import Exceeded, Limits, Meter
from ftopt.sync.server.rendezvous import Rendezvous

from .access import (
    TOKEN,
    Scripted,
    coordinator,
    identity,
    no_errors_logged,
    scripted,
    status,
    touchstone,
)

PATHS = ["/live", "/status", "/connect", "/metrics", "/status/../status", "/nothing?x=1", "/%00", "/connect/"]
HEADERS: list[dict[str, str]] = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": f"Bearer {TOKEN[:-1]}"},
    {"Authorization": f"Bearer {TOKEN}0"},
    {"Authorization": f"Bearer  {TOKEN}"},
    {"Authorization": f"Basic {TOKEN}"},
    {"Authorization": TOKEN},
    {"Authorization": "Bearer \u00e4\u2603"},
    {"X-Token": TOKEN},
    {"Cookie": f"token={TOKEN}"},
]


async def _timeless(url: str) -> str:
    """``/status``, but for what changes by itself."""
    return re.sub(r'"age_s": [0-9.]+', "", (await status(url))[1])


async def _strangers() -> None:
    async with coordinator() as url, touchstone(url), aiohttp.ClientSession() as session:
        before = await _timeless(url)
        answers = set()
        for headers in HEADERS:
            for path in PATHS:
                for method in ("GET", "POST", "HEAD"):
                    async with session.request(method, f"{url}{path}", headers=headers) as answer:
                        assert answer.status == 401
                        if method != "HEAD":
                            answers.add(await answer.text())
        assert answers == {"a token is needed"}  # whatever is there or not
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await session.ws_connect(f"{url}/connect", headers={"Authorization": "Bearer x"})
        assert await _timeless(url) == before


def test_without_the_token_nothing_is_learned_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "_QUIET_S", 600.0)  # hundreds of requests may take longer than usual
    with no_errors_logged() as warnings:
        asyncio.run(_strangers())
    assert len(warnings) == 1  # a log that strangers can fill is a door, too


async def _page() -> None:
    """The live page is the same for everybody, and nobody is let in by asking for it."""
    async with coordinator() as url, aiohttp.ClientSession() as session:
        before = await status(url, path="/")
        async with touchstone(url):
            for headers in HEADERS:
                async with session.get(f"{url}/", headers=headers) as answer:
                    assert (answer.status, await answer.text()) == before
                    assert answer.headers["Connection"] == "close"
                for method, path in (("POST", "/"), ("GET", "//"), ("GET", f"/live?token={TOKEN}")):
                    async with session.request(method, url + path, headers=headers) as answer:
                        assert answer.status == 401
            assert await status(url, path="/") == before


def test_without_the_token_there_is_the_live_page_without_data() -> None:
    with no_errors_logged():
        asyncio.run(_page())


async def _open_status() -> None:
    async with coordinator(open_status=True) as url, touchstone(url), aiohttp.ClientSession() as session:
        for path in ("/status", "/metrics", "/live"):
            assert (await status(url, None, path))[0] == 200
            async with session.get(f"{url}{path}", headers={"Host": "evil.example:29410"}) as answer:
                assert answer.status == 403  # by a foreign page, DNS rebinding
            by_name = authorization(TOKEN) | {"Host": "head.example"}
            async with session.get(f"{url}{path}", headers=by_name) as answer:
                assert answer.status == 200
        async with session.get(f"{url}/connect") as answer:
            assert answer.status == 401


def test_status_and_metrics_alone_can_be_opened_on_purpose() -> None:
    asyncio.run(_open_status())


Misbehave = Callable[[Scripted], Awaitable[None]]
"""What a replica with the token does; it loses its connection, and nobody else notices."""


async def _large(replica: Scripted) -> None:
    with pytest.raises((ConnectionError, aiohttp.ClientError)):
        await replica.send("x" * (5 << 20))
        raise ConnectionError  # all was sent before the coordinator closed


async def _binary(replica: Scripted) -> None:
    await replica.socket.send_bytes(b"{}")


async def _silent(replica: Scripted) -> None:
    pass


async def _no_hello(replica: Scripted) -> None:
    await replica.send(m.Heartbeat("training", 1, 0.1))


async def _two_hellos(replica: Scripted) -> None:
    await replica.join()
    await replica.send(replica.machine.hello())


async def _a_coordinators_message(replica: Scripted) -> None:
    await replica.join()
    await replica.send(m.encode(m.TrainOn(0)))


async def _many_messages(replica: Scripted) -> None:
    await replica.join()
    with pytest.raises((ConnectionError, aiohttp.ClientError)):
        for _ in range(3000):
            await replica.send(m.Heartbeat("training", 1, 0.1))
        raise ConnectionError  # all were sent before the coordinator closed


async def _many_bytes(replica: Scripted) -> None:
    await replica.join()
    with pytest.raises((ConnectionError, aiohttp.ClientError)):
        for i in range(40):
            await replica.send(m.StoreSet(f"0.1/{i}", "AAAA" * 25_000))
        raise ConnectionError


async def _many_keys(replica: Scripted) -> None:
    await replica.join()
    for i in range(40):
        await replica.send(m.StoreSet(f"0.1/{i}", "AAAA"))


MISBEHAVIOUR: dict[str, tuple[Misbehave, str]] = {
    "a message of 5 MiB": (_large, "exceeds limit"),
    "binary": (_binary, "sends no text"),
    "no hello in time": (_silent, ""),
    "another message than a hello": (_no_hello, "first message"),
    "two hellos": (_two_hellos, "first message"),
    "a coordinator's message": (_a_coordinators_message, "a replica sends no TrainOn"),
    "too many messages": (_many_messages, "messages a second"),
    "too many bytes": (_many_bytes, "bytes a second"),
    "too many rendezvous keys": (_many_keys, "a rendezvous of more than 20 keys"),
}


async def _misbehave(behaviour: Misbehave) -> None:
    patience_s = 2.0 if behaviour is _silent else 30.0  # the others have it for what they do
    rates = {"messages_per_s": 10.0, "bytes_per_s": 1e4}  # which it exceeds, however long it takes to send
    limits = Limits(patience_s=patience_s, message_burst=1000, byte_burst=1e6, store_keys=20, **rates)
    async with (
        coordinator(limits=limits) as url,
        touchstone(url) as stone,
        scripted(url, identity("other", "x")) as replica,
    ):
        await behaviour(replica)
        assert await replica.ended()
        await stone.check()
        async with scripted(url, identity("other", "y")) as next_one:
            await next_one.send(next_one.machine.hello())
            assert await next_one.receive() is not None  # the job that it was in takes others as before


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_who_breaks_a_rule_loses_its_own_connection_alone(name: str) -> None:
    behaviour, words = MISBEHAVIOUR[name]
    with no_errors_logged() as warnings:
        asyncio.run(_misbehave(behaviour))
    assert any(words in warning for warning in [*warnings, ""])
    assert len(warnings) == bool(words)


def hello(**options: Any) -> m.Hello:
    """A hello that would be taken, but for ``options``."""
    return replace(Replica(identity("other", "x")).hello(), **options)


NONSENSE: dict[str, tuple[m.FromReplica, str]] = {
    "job name": (hello(job="x" * 129), "job: it has 129 characters"),
    "job without a name": (hello(job=""), "job: it is empty"),
    "a blank for a name": (hello(job=" "), "job: it begins or ends with a blank"),
    "an option for a name": (hello(replica="-rf"), "replica: it is a dot"),
    "a folder for a name": (hello(job=".."), "job: it is a dot"),
    "a combining character": (hello(replica="\u0301a"), "replica: it begins with a combining"),
    "replica name": (hello(replica="a\nb"), "replica: it holds characters"),
    "incarnation": (hello(incarnation=-1), "incarnation: -1"),
    "rank": (hello(rank=1), "rank: 1"),
    "size": (hello(size=0), "size: 0"),
    "epoch": (hello(epoch=1 << 40), "epoch"),
    "fragments": (hello(fragments=1 << 20), "fragments"),
    "no fragments": (hello(fragments=0), "fragments"),
    "lines": (hello(lines={str(i): "" for i in range(300)}), "lines: 300 entries"),
    "roster": (hello(roster=tuple((f"r{i}", 1) for i in range(5000))), "roster: 5000 entries"),
    "roster's incarnation": (hello(roster=(("r", 0),)), "roster: 0"),
    "two positions": (hello(positions=(m.Position(0, 1, "a"), m.Position(0, 2, "b"))), "positions: two of fragment 0"),
    "position": (hello(positions=(m.Position(7, 1, "a"),)), "positions.fragment: 7"),
    "version": (hello(positions=(m.Position(0, -1, "a"),)), "version: -1"),
    "steps": (m.Propose(m.Contribution(0, 0, -5, 5, 5.0)), "steps: -5"),
    "more steps than taken": (m.Propose(m.Contribution(0, 0, 6, 5, 5.0)), "steps: 6"),
    "weight": (m.Propose(m.Contribution(0, 0, 5, 5, -1.0)), "weight: -1"),
    "huge weight": (m.Propose(m.Contribution(0, 0, 5, 5, 1e300)), "weight: 1e+300"),
    "weight of nothing": (m.Propose(m.Contribution(0, 0, 0, 5, 1.0)), "weight: 1 for what has no steps"),
    "weight of nan": (m.Propose(m.Contribution(0, 0, 5, 5, 1.0, finite=False)), "not finite"),
    "overlap": (m.Propose(m.Contribution(0, 0, 5, 5, 5.0, overlap_s=-1.0)), "overlap_s: -1"),
    "grace": (m.Propose(m.Contribution(0, 0, 5, 5, 5.0, grace=1e9)), "grace: 1000000000"),
    "ranges": (m.Propose(m.Contribution(0, 0, 5, 5, 5.0, ranges=((9, 3),))), "ranges: 9"),
    "ranges that touch": (m.Propose(m.Contribution(0, 0, 5, 5, 5.0, ranges=((0, 3), (3, 9)))), "ranges: (3, 9)"),
    "claim": (hello(claim=((5, 9), (0, 3))), "claim: (0, 3) after 9"),
    "done": (hello(done=((0, (1 << 53) - 1),)), "done: 9007199254740991"),
    "cursor": (hello(cursor=-1), "cursor: -1"),
    "wants": (hello(wants=1 << 40), "wants: 1099511627776"),
    "ask": (m.Ask(-1), "units: -1"),
    "fragment": (m.Lacks(-1), "fragment: -1"),
    "attempt": (m.Prepared(0, -1, "d"), "attempt: -1"),
    "digest": (m.Prepared(0, 1, "d" * 300), "digest: 300 characters"),
    "reason": (m.Failed(0, 1, "x" * 5000, ""), "reason: 5000 characters"),
    "step_s": (m.Heartbeat("training", 1, 1e9), "step_s"),
    "value": (m.StoreSet("k", "no base64!"), "base64"),
    "key": (m.StoreGet("k" * 600), "key: 600 characters"),
}


async def _nonsense() -> None:
    async with coordinator() as url, touchstone(url) as stone:
        for name, (message, words) in NONSENSE.items():
            with no_errors_logged() as warnings:
                async with scripted(url, identity("other", "x")) as replica:
                    if not isinstance(message, m.Hello):
                        await replica.send(replica.machine.hello())
                    await replica.send(message)
                    assert await replica.ended(), name
                await stone.check()
            assert any(words in warning for warning in warnings), (name, warnings)
        assert '"job": "other"' in (await status(url))[1]


def test_what_makes_no_sense_is_refused_with_the_reason() -> None:
    asyncio.run(_nonsense())


async def _replicas() -> None:
    async with (
        coordinator(limits=Limits(replicas=3)) as url,
        touchstone(url),
        scripted(url, identity("other", "r0")) as first,
    ):
        await first.join()
        for name, roster in (("r1", ()), ("r2", (("ghost", 1),))):
            async with scripted(url, identity("other", name)) as replica:
                await replica.send(replace(replica.machine.hello(), roster=roster))
                got = await replica.receive()
                assert isinstance(got, m.Welcome if name == "r1" else m.Refuse), got
                if isinstance(got, m.Refuse):
                    assert "at most 3 are taken" in got.reason
                    assert await replica.ended()
        assert await first.outer_step() == 1


def test_a_full_job_refuses_further_replicas_and_goes_on() -> None:
    asyncio.run(_replicas())


async def _unreadable_hello() -> None:
    async with coordinator() as url, touchstone(url) as stone, scripted(url, identity(initial="i" * 1000)) as replica:
        await replica.send(replica.machine.hello(), replica.machine.hello())
        got = await replica.receive()
        assert isinstance(got, m.Refuse) and got.kind == "unreadable"
        assert "initial: 1000 characters; at most 256" in got.reason
        assert await replica.ended()
        await stone.check()


def test_who_says_a_hello_that_cannot_be_read_is_told_why() -> None:
    asyncio.run(_unreadable_hello())


async def _jobs() -> None:
    async with coordinator(limits=Limits(jobs=2)) as url, touchstone(url):
        async with scripted(url, identity("second")) as second:
            await second.join()
            async with scripted(url, identity("third")) as third:
                await third.send(third.machine.hello())
                assert await third.ended()
            assert await second.outer_step() == 1
        async with scripted(url, identity("third")) as third:
            while '"away"' not in (await status(url))[1]:  # the coordinator has heard that the second has gone
                await asyncio.sleep(0.01)
            await third.join()  # nobody is connected to the second any more
        for line in ("a", "b"):
            async with scripted(url, identity("stone", f"x{line}", lines={"model": line})) as misfit:
                await misfit.send(misfit.machine.hello())
                assert isinstance(await misfit.receive(), m.Refuse)
        assert "second" not in (await status(url))[1]


def test_jobs_that_nobody_is_connected_to_make_room() -> None:
    asyncio.run(_jobs())


async def _connections() -> None:
    async with (
        coordinator(limits=Limits(connections=2)) as url,
        touchstone(url),
        scripted(url, identity("other")) as other,
    ):
        await other.join()
        with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
            async with scripted(url):
                pass


def test_there_are_so_many_connections_and_no_more() -> None:
    with no_errors_logged():
        asyncio.run(_connections())


async def _flood() -> None:
    """Connections that show no token: the oldest go, and a replica still comes in."""
    async with coordinator(limits=Limits(waiting=20, patience_s=2.0)) as url, touchstone(url) as stone:
        host, port = url.removeprefix("http://").split(":")
        crowd = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        for _, writer in crowd[::2]:
            writer.write(b"GET /status HTTP/1.1\r\n")
        async with scripted(url, identity("other")) as other:
            await other.join()
            await stone.check()
            async with asyncio.timeout(60):
                for reader, writer in crowd:  # closed by number, or by time
                    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                        await reader.readexactly(1)
                    writer.close()
            assert await other.outer_step() == 1


def test_a_flood_of_strangers_displaces_itself() -> None:
    with no_errors_logged() as warnings:
        asyncio.run(_flood())
    assert [w for w in warnings if "wait for authentication" in w]


async def _deaf() -> None:
    """A replica that asks and asks, and never reads the answers."""
    limits = Limits(unsent_bytes=1 << 20, message_burst=1e6, byte_burst=1e9)
    async with coordinator(limits=limits) as url, touchstone(url), scripted(url, identity("other")) as replica:
        await replica.join()
        await replica.send(m.StoreSet("g/k", "AAAA" * 50_000))
        transport: Any = replica.socket.get_extra_info("transport") or replica.socket._conn.transport  # type: ignore
        transport.pause_reading()
        with pytest.raises((ConnectionError, aiohttp.ClientError)):
            async with asyncio.timeout(60):
                while True:
                    await replica.send(m.StoreGet("g/k"))
                    await asyncio.sleep(0)


def test_what_waits_for_a_deaf_connection_is_bounded() -> None:
    with no_errors_logged() as warnings:
        asyncio.run(_deaf())
    assert any("does not read" in w for w in warnings)


def test_a_meter_allows_the_burst_and_then_the_rate() -> None:
    meter = Meter("messages", 10.0, 5.0, 0.0)
    for _ in range(5):
        meter.draw(1, 0.0)
    with pytest.raises(Exceeded, match="more than 10 messages a second"):
        meter.draw(1, 0.0)
    meter.draw(2, 0.2)
    with pytest.raises(Exceeded):
        meter.draw(1, 0.2)
    meter.draw(5, 100.0)


def test_the_rendezvous_store_keeps_the_newest_groups_and_forgets_the_oldest_questions() -> None:
    answers: list[tuple[int, str, str]] = []
    store = Rendezvous(
        Limits(groups=2, store_keys=4, store_bytes=40, waiting_keys=2), lambda *told: answers.append(told)
    )
    store.get(1, "a/0")
    store.set("a/0", "AAAA")
    store.get(2, "a/0")
    assert answers == [(1, "a/0", "AAAA"), (2, "a/0", "AAAA")]
    for group in "bc":
        store.set(f"{group}/0", "BBBB")
    store.get(3, "a/0")
    assert len(answers) == 2  # gone, with the oldest group
    for i in range(1, 4):
        store.set(f"c/{i}", "CCCC")
    with pytest.raises(Exceeded):
        store.set("c/4", "CCCC")
    store.set("c/3", "C" * 28)
    with pytest.raises(Exceeded):
        store.set("c/3", "C" * 32)
    store.get(4, "x/0")
    store.get(4, "x/1")
    store.get(4, "x/2")
    store.forget(3)
    store.set("x/0", "XXXX")
    store.set("x/2", "XXXX")
    assert answers[2:] == [(4, "x/2", "XXXX")]
    store.forget(4)
    assert not store._waiting
    assert not store._asked


async def _gone_before_its_pong() -> None:
    async with coordinator() as url, scripted(url) as replica:
        await replica.join()
        await replica.socket.ping()
        assert await replica.ended()


def test_who_is_gone_before_its_ping_is_answered_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(*_: object) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(aiohttp.web.WebSocketResponse, "pong", gone)
    with no_errors_logged():
        asyncio.run(_gone_before_its_pong())
