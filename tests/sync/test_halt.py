"""EPOCH in the shell: a machine that meets a higher epoch is followed by one that starts from the journal."""

from __future__ import annotations

import asyncio

from ftopt.events import ignore
from ftopt.sync.job import Job, Peer
from ftopt.sync.journal import Journal
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import Identity, Replica

SETTINGS: dict[str, int | float | str | None] = {"start_replicas": 1}


def test_a_halted_machine_is_followed_by_one_of_a_higher_epoch() -> None:
    async def scene() -> None:
        job = Job("j", Journal(None), ignore)
        first = Replica(Identity("j", "r0", {}, SETTINGS, "aa"))
        said: list[str] = []
        conn = job.open(Peer(said.append, lambda: None))
        job.receive(conn, first.hello())
        assert job.machine.running
        epoch = job.machine.epoch
        stranger = Replica(Identity("j", "r1", {}, SETTINGS, "aa"), incarnation=1, epoch=epoch + 5)
        job.receive(job.open(Peer(said.append, lambda: None)), stranger.hello())
        assert job.machine.halted
        while job.machine.halted:
            await asyncio.sleep(0.05)
        again = job.open(Peer(said.append, lambda: None))
        job.receive(again, stranger.hello())
        assert job.machine.epoch > epoch + 5
        assert isinstance(m.decode(said[-1]), m.Hold | m.Welcome | m.Roster | m.Refused)
        job.end()

    asyncio.run(asyncio.wait_for(scene(), 20))
