"""Replicas without a trainer: the real replica machine on a real WebSocket, many in a process, with empty payloads.

As a program (``python -m benchmarks.speed.swarm ARGUMENTS``, JSON) it reads one order per line on stdin and answers
each with a line of JSON. What replicas compute from the member list alone is computed once per process; in a real job
each has a machine of its own for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.speed.orders import Crew, answer, crew
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.protocol.replica import effects as p
from ftopt.sync.protocol.replica import machine
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.replica.prepared import agree
from ftopt.sync.replica.link import Channel
from ftopt.sync.replica.websocket import WebSocketLink

_START_S = 240.0


class Soldier:
    """One replica. It proposes when told to, and whenever a version is committed while rounds are to be made."""

    def __init__(self, swarm: Swarm, name: str, policy: FaultPolicy) -> None:
        settings = asdict(policy)
        lines = {f"policy.{key}": str(value) for key, value in settings.items()}
        self.machine = Replica(Identity("swarm", name, lines, settings, initial="0"))
        self._swarm = swarm
        self._channel: Channel | None = None
        self._proposed_s = 0.0

    async def open(self, link: WebSocketLink) -> None:
        """Connects and says hello."""
        self._channel = await link.open(self._receive)
        self._run(self.machine.connect())

    def propose(self) -> None:
        """One inner step towards the next version."""
        record = self.machine.fragments[0].record
        assert record is not None
        self._proposed_s = time.monotonic()
        step = self.machine.counted_step(record) + 1
        self._run(self.machine.propose(m.Contribution(0, record.version, 1, step, 1.0)))

    def beat(self) -> None:
        """A heartbeat."""
        self._send(m.Heartbeat("training", 0, 0.1))

    def _receive(self, text: str) -> None:
        message = m.decode(text)
        assert isinstance(message, m.FromCoordinator)
        self._run(self.machine.receive(message))

    def _run(self, effects: list[p.ReplicaEffect]) -> None:
        for effect in effects:
            match effect:
                case p.Send(message=message):
                    self._send(message)
                case p.StartReduce(quorum=q):
                    rows = [[q.last_step]] * q.size  # all have made as many steps
                    self._run(self.machine.reduced(0, q.attempt, "empty", rows))
                case p.Begin():
                    self._swarm.started(self)
                case p.CommitPrepared():
                    self._swarm.decided(self, time.monotonic() - self._proposed_s)
                case p.GiveUp(reason=reason) | p.Disconnect(reason=reason) | p.Reset(reason=reason):
                    raise RuntimeError(reason)

    def _send(self, message: m.FromReplica) -> None:
        assert self._channel is not None
        self._channel.send(m.encode(message))


class Swarm:
    """The replicas of one process."""

    def __init__(self, url: str, first: int, count: int, policy: FaultPolicy) -> None:
        self._soldiers = [Soldier(self, f"r{first + i:05}", policy) for i in range(count)]
        self._url = url
        self._sync = policy
        self._ready = 0
        self._left: dict[Soldier, int] = {}
        self._taken_s: list[float] = []
        self._changed = asyncio.Event()

    async def open(self) -> dict[str, Any]:
        """Everybody is in, at version 0."""
        began = time.monotonic()
        for i in range(0, len(self._soldiers), 50):
            await asyncio.gather(*(self._connect(x) for x in self._soldiers[i : i + 50]))
        self._beating = asyncio.create_task(self._beat())
        while self._ready < len(self._soldiers):
            await self._change()
        return {"start_s": time.monotonic() - began}

    async def rounds(self, count: int) -> dict[str, Any]:
        """``count`` rounds one after another: each replica's seconds from propose to commit, and all of it."""
        began, self._taken_s = time.monotonic(), []
        self._left = dict.fromkeys(self._soldiers, count)
        for x in self._soldiers:
            x.propose()
        while self._left:
            await self._change()
        return {"taken_s": self._taken_s, "all_s": time.monotonic() - began}

    def started(self, who: Soldier) -> None:
        """It holds version 0."""
        self._ready += 1
        self._changed.set()

    def decided(self, who: Soldier, taken_s: float) -> None:
        """Its contribution is in."""
        self._taken_s.append(taken_s)
        self._left[who] -= 1
        if self._left[who]:
            who.propose()
        else:
            del self._left[who]
            self._changed.set()

    async def _connect(self, who: Soldier) -> None:
        link = WebSocketLink(self._url, token=None, dead_after_s=self._sync.dead_after_s)
        await who.open(link)

    async def _change(self) -> None:
        self._changed.clear()
        await asyncio.wait_for(self._changed.wait(), _START_S)

    async def _beat(self) -> None:
        """Heartbeats, spread over the time between two."""
        while True:
            began, pause_s = time.monotonic(), self._sync.derived.heartbeat_s / len(self._soldiers)
            for i, x in enumerate(self._soldiers):
                x.beat()
                await asyncio.sleep(max(0.0, began + (i + 1) * pause_s - time.monotonic()))


@contextmanager
def swarm(url: str, replicas: int, processes: int, policy: FaultPolicy) -> Iterator[Crew]:
    """That many replicas in so many processes, all begun; they are gone when the block ends."""
    counts = [replicas // processes + (i < replicas % processes) for i in range(processes)]
    arguments = [
        {"url": url, "first": sum(counts[:i]), "count": count, "policy": asdict(policy)}
        for i, count in enumerate(counts)
    ]
    with crew("benchmarks.speed.swarm", arguments) as found:
        found.all("open")
        yield found


async def _obey(arguments: dict[str, Any]) -> None:
    own = Swarm(arguments["url"], arguments["first"], arguments["count"], FaultPolicy(**arguments["policy"]))
    while line := await asyncio.to_thread(sys.stdin.readline):
        verb, *numbers = line.split()
        answer(await (own.rounds(int(numbers[0])) if verb == "rounds" else own.open()))


def _once(agree: Callable[..., tuple[str, m.Record]]) -> Callable[..., tuple[str, m.Record]]:
    """``agree``, computed once for all replicas of this process: all of them hold the same record."""
    last: dict[tuple[str, int, str], tuple[str, m.Record]] = {}

    def known(
        record: m.Record, quorum: m.Quorum, members: Sequence[m.IncarnationId], rows: list[list[int]], digest: str
    ) -> tuple[str, m.Record]:
        key = (record.chain, quorum.attempt, digest)
        if key not in last:
            last.clear()
            last[key] = agree(record, quorum, members, rows, digest)
        return last[key]

    return known


def main() -> None:
    """Takes orders until stdin ends."""
    machine.agree = _once(agree)
    asyncio.run(_obey(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
