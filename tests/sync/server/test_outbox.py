"""A slow disk holds up what is to be on it, and nothing else: the journal is written beside the event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from ftopt.events import Event
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Epoch
from ftopt.sync.protocol.replica.effects import Send
from ftopt.sync.protocol.replica.resumed import Held
from ftopt.sync.protocol.values import Counts
from ftopt.sync.server import journal as journal_module
from ftopt.sync.server.coordinator import CoordinatorServer
from ftopt.sync.server.journal import Journal, JournalError
from ftopt.sync.server.outbox import Outbox
from tests.sync.server.access import TOKEN, Scripted, identity, scripted, status


class SlowDisk(Journal):
    """A journal whose disk stands still while `goes_on` is not set; it fails once where `fails` is."""

    def __init__(self, path: Path) -> None:
        self.goes_on, self.fails = threading.Event(), False
        self.goes_on.set()
        super().__init__(path)

    def _append(self, body: bytes) -> None:
        assert self.goes_on.wait(60)
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super()._append(body)


async def say(replica: Scripted, effects: list[object]) -> None:
    for effect in effects:
        assert isinstance(effect, Send)
        await replica.send(effect.message)


async def decides(replica: Scripted) -> None:
    """Says all that version 1 needs, and does not wait for its commit."""
    await say(replica, list(replica.machine.propose(m.Contribution(0, 0, 5, 5, 5.0))))
    quorum = await replica.until(m.Quorum)
    await say(replica, list(replica.machine.reduced(0, quorum.attempt, "d", [[5]])))


def test_while_the_disk_stands_still_connections_live_and_nothing_is_told(tmp_path: Path) -> None:
    async def scene() -> None:
        events: list[Event] = []
        server = CoordinatorServer("127.0.0.1", 0, new=True, token=TOKEN, on_event=events.append)
        server._journal = journal = SlowDisk(tmp_path / "journal")
        url = f"http://127.0.0.1:{await server.start()}"
        try:
            async with scripted(url) as replica, scripted(url, identity(job="other")) as other:
                await replica.join()
                await other.join()
                journal.goes_on.clear()
                await decides(replica)
                asked = asyncio.create_task(status(url))
                for at_work in (replica, other):
                    await at_work.send(m.StoreSet("job/0/1/0", "eA=="), m.StoreGet("job/0/1/0"))
                    answer = await at_work.receive()
                    assert isinstance(answer, m.StoreValue), "a commit that is not on the disk, or nothing at all"
                assert not asked.done() and not [x for x in events if x.event == "decide"]
                assert server._jobs["job"].machine.rounds[0].at.version == 1
                journal.goes_on.set()
                assert (await replica.until(m.Commit)).version == 1
                assert '"version": 1' in (await asked)[1]
                assert len([x for x in events if x.event == "decide"]) == 1
        finally:
            journal.goes_on.set()
            await server.stop()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_decision_that_waits_for_the_disk_is_told_when_the_coordinator_stops(tmp_path: Path) -> None:
    async def scene() -> None:
        events: list[Event] = []
        server = CoordinatorServer("127.0.0.1", 0, new=True, token=TOKEN, on_event=events.append)
        server._journal = journal = SlowDisk(tmp_path / "journal")
        url = f"http://127.0.0.1:{await server.start()}"
        async with scripted(url) as replica:
            await replica.join()
            journal.goes_on.clear()
            await decides(replica)
            while not server._jobs["job"].machine.rounds[0].at.version:
                await asyncio.sleep(0.01)
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0.05)
            assert not stopping.done()
            journal.goes_on.set()
            await stopping
            assert (await replica.until(m.Commit)).version == 1
        assert [x.version for x in events if x.event == "decide"] == [1]

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_coordinator_that_stops_loses_none_of_its_replicas(tmp_path: Path) -> None:
    """They train on, and find the next one: its record ends with what they have counted, and tells of no loss."""

    async def scene() -> None:
        events: list[Event] = []
        server = CoordinatorServer("127.0.0.1", 0, new=True, token=TOKEN, on_event=events.append)
        url = f"http://127.0.0.1:{await server.start()}"
        async with scripted(url) as stays, scripted(url, identity(replica="r1")) as leaves:
            await stays.join()
            await leaves.join()
            await leaves.socket.close()
            while not [x for x in events if x.event == "lost"]:
                await asyncio.sleep(0.01)
            for steps in (3, 7):
                await stays.send(m.Heartbeat("training", steps, 0.1, counts=Counts(steps, pending=steps)))
                while server._jobs["job"].machine.roster.members["r0"].inner_step != steps:
                    await asyncio.sleep(0.01)
            await server.stop()
            assert await stays.ended()
        assert [x.replica for x in events if x.event == "lost"] == ["r1"]
        (incarnation, counted) = events[-1].data["counts"]["r0"]
        assert (events[-1].event, incarnation, counted["steps"], counted["pending"]) == ("counts", 1, 7, 7)
        assert "r1" not in events[-1].data["counts"]

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_after_a_write_that_fails_none_that_came_after_it_is_written(tmp_path: Path) -> None:
    """They are decisions of a machine that has gone on from what is not on the disk."""

    async def scene() -> None:
        journal = SlowDisk(tmp_path / "journal")
        assert journal.submit("j", [Epoch(1)]) is not None
        assert (saved := journal.load("j")) is not None and saved.epoch == 1
        journal.goes_on.clear()
        journal.fails = True
        futures = [journal.submit("j", [Epoch(2)]), journal.submit("j", [Epoch(3)]), journal.submit("k", [Epoch(9)])]
        journal.goes_on.set()
        results = await asyncio.gather(*(x for x in futures if x is not None), return_exceptions=True)
        assert isinstance(results[0], JournalError) and "Input/output error" in str(results[0])
        assert isinstance(results[1], JournalError)
        assert results[2] is None, "another job's"
        assert (saved := journal.load("j")) is not None and saved.epoch == 1
        last = journal.submit("j", [Epoch(4)])
        assert last is not None
        await last
        journal.close()
        again = Journal(tmp_path / "journal")
        assert (saved := again.load("j")) is not None and saved.epoch == 4
        again.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_disk_with_hardly_any_room_lets_no_halted_job_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first row of a few bytes has room where a round has none: the job would start and halt by turns."""
    journal = Journal(tmp_path / "journal")
    journal.check_room()
    disk = os.statvfs(tmp_path)
    monkeypatch.setattr(journal_module, "_ROOM_BYTES", disk.f_blocks * disk.f_frsize + 1)
    with pytest.raises(JournalError, match=r"has \d+ KiB of room, and \d+ KiB are needed to go on; make room on it"):
        journal.check_room()
    journal.close()
    Journal(None).check_room()


def test_a_hello_waits_for_what_is_decided_before_it(tmp_path: Path) -> None:
    """The last replica leaves, and its checkpoint is resumed while that is being written: the job is taken up, and
    the replica goes on as what it was; with the machine alone its incarnation is gone."""

    async def scene() -> None:
        server = CoordinatorServer("127.0.0.1", 0, new=True, token=TOKEN)
        server._journal = journal = SlowDisk(tmp_path / "journal")
        url = f"http://127.0.0.1:{await server.start()}"
        try:
            async with scripted(url) as replica:
                await replica.join()
                assert await replica.outer_step() == 1
                record = replica.machine.fragments[0].record
                assert record is not None
                held = Held("r0", 1, replica.machine.epoch, roster={"r0": 1}, records=(record,))
                journal.goes_on.clear()
                await replica.send(m.Bye())
                while server._jobs["job"].machine.roster.members:
                    await asyncio.sleep(0.01)
                async with scripted(url) as again:
                    again.machine.resume(held)
                    await say(again, list(again.machine.connect()))
                    await asyncio.sleep(0.1)
                    shown = (await status(url))[1]
                    assert "waits for the disk of its journal" in shown
                    journal.goes_on.set()
                    await again.until(m.Welcome)
                    assert again.machine.incarnation == 1
        finally:
            journal.goes_on.set()
            await server.stop()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_disk_that_stands_still_stops_neither_the_status_nor_the_end(tmp_path: Path) -> None:
    async def scene() -> None:
        journal, done = SlowDisk(tmp_path / "journal"), list[str]()
        outbox = Outbox("j", journal, lambda error: done.append(str(error)))
        journal.goes_on.clear()
        outbox.add([Epoch(1)], lambda: done.append("first"))
        waits = asyncio.create_task(outbox.written())
        await asyncio.sleep(0.01)
        outbox.add([Epoch(2)], lambda: done.append("second"))
        journal.goes_on.set()
        await waits
        assert "first" in done, "it need not wait for what came after it"
        await outbox.written()
        assert done == ["first", "second"] and not outbox
        outbox.add([Epoch(3)], lambda: done.append("dropped"))
        outbox.clear()
        await outbox.written()
        await asyncio.sleep(0.05)
        assert done == ["first", "second"]
        journal.close()

    asyncio.run(asyncio.wait_for(scene(), 60))
