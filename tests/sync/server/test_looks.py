"""A job of several fragments looks at them once after all messages of a turn, and before a connection comes or goes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ftopt.events import ignore
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.server.job import Job, Peer
from ftopt.sync.server.journal import Journal

MANY = 16


class Member:
    """A replica without a loop: its machine, and the texts that its connection has been sent."""

    def __init__(self, job: Job, name: str, replicas: int, fragments: int, *, standby: bool = False) -> None:
        self.job, self.inbox = job, list[m.FromCoordinator]()
        identity = Identity("j", name, {}, {"start_replicas": replicas}, "aa", fragments)
        self.machine = Replica(identity, standby=standby)
        self.conn = job.open(Peer(self._hear, lambda: None))
        job.receive(self.conn, self.machine.connect()[0].message)  # type: ignore[union-attr]

    def _hear(self, text: str) -> None:
        message = m.decode(text)
        assert isinstance(message, m.FromCoordinator)
        self.inbox.append(message)

    def say(self, effects: list[r.ReplicaEffect]) -> None:
        for effect in effects:
            if isinstance(effect, r.Send):
                self.job.receive(self.conn, effect.message)

    def take(self) -> None:
        while self.inbox:
            self.say(self.machine.receive(self.inbox.pop(0)))

    def propose_all(self, step: int) -> None:
        for f in self.machine.fragments:
            assert f.record is not None
            self.say(self.machine.propose(m.Contribution(f.index, f.record.version, 5, step, 5.0)))

    def got(self, kind: type) -> list[int]:
        return [x.fragment for x in self.inbox if isinstance(x, kind)]


def test_one_look_follows_all_messages_of_a_turn_and_decides_what_each_alone_would() -> None:
    async def scene() -> None:
        job = Job("j", Journal(None), ignore)
        members = [Member(job, f"r{i}", 2, MANY) for i in range(2)]
        for member in members:
            member.take()
        await asyncio.sleep(0)
        looks = job.machine.looks
        for member in members:
            member.propose_all(5)
        assert job.machine.looks == looks and job.machine.owes_look
        await asyncio.sleep(0)
        assert job.machine.looks == looks + 1 and not job.machine.owes_look
        for member in members:
            assert member.got(m.Quorum) == list(range(MANY))
            quorums = [x for x in member.inbox if isinstance(x, m.Quorum)]
            member.take()
            for quorum in quorums:
                member.say(member.machine.reduced(quorum.fragment, quorum.attempt, "d", [[5], [5]]))
        await asyncio.sleep(0)
        assert job.machine.looks <= looks + 3
        assert [r.at.version for r in job.machine.rounds] == [1] * MANY
        assert all(member.got(m.Commit) == list(range(MANY)) for member in members)
        job.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("opens", [True, False])
def test_what_came_before_a_connection_ends_or_opens_is_looked_at_first(opens: bool) -> None:
    async def scene() -> None:
        job = Job("j", Journal(None), ignore)
        members = [Member(job, f"r{i}", 2, 2) for i in range(2)]
        for member in members:
            member.take()
        for member in members:
            member.propose_all(5)
        assert job.machine.owes_look
        if opens:
            Member(job, "r2", 2, 2)
        else:
            job.lost(members[1].conn)
        assert not job.machine.owes_look
        assert all(member.got(m.Quorum)[:2] == [0, 1] for member in members)
        job.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_job_of_one_fragment_looks_at_once_and_a_closed_one_no_more() -> None:
    async def scene() -> None:
        job = Job("j", Journal(None), ignore)
        alone = Member(job, "r0", 1, 1)
        alone.take()
        alone.propose_all(5)
        assert alone.got(m.Quorum) == [0] and not job.machine.owes_look
        other = Job("j", Journal(None), ignore)
        several = Member(other, "r0", 1, 2)
        several.take()
        several.propose_all(5)
        looks = other.machine.looks
        other.close()
        await asyncio.sleep(0)
        assert other.machine.looks == looks and not several.got(m.Quorum)
        job.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_spare_that_comes_in_the_turn_of_the_last_goodbye_hears_that_the_job_is_over(tmp_path: Path) -> None:
    async def scene() -> None:
        journal = Journal(tmp_path / "journal")
        job = Job("j", journal, ignore)
        alone = Member(job, "r0", 1, 2)

        async def settled() -> None:
            for _ in range(5):
                await job.written()
                await asyncio.sleep(0)
                alone.take()

        await settled()
        alone.propose_all(5)
        await job.written()
        await asyncio.sleep(0)
        quorums = [x for x in alone.inbox if isinstance(x, m.Quorum)]
        alone.take()
        for quorum in quorums:
            alone.say(alone.machine.reduced(quorum.fragment, quorum.attempt, "d", [[5]]))
        await settled()
        assert [r.at.version for r in job.machine.rounds] == [1, 1]
        job.receive(alone.conn, m.Bye(early=True))
        spare = Member(job, "s0", 1, 2, standby=True)
        await job.written()
        await asyncio.sleep(0)
        await job.written()
        assert job.ended and [type(x) for x in spare.inbox] == [m.Over]
        job.close()
        journal.close()

    asyncio.run(asyncio.wait_for(scene(), 60))
