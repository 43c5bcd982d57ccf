"""A job that halts is followed by one that starts from the journal: EPOCH, and a journal that cannot be written."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftopt.events import Event, ignore
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Decided, Epoch, Known
from ftopt.sync.protocol.replica.effects import Send
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.server import job as job_module
from ftopt.sync.server.coordinator import CoordinatorServer
from ftopt.sync.server.job import Job, Peer
from ftopt.sync.server.journal import Journal, JournalError
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines
from tests.sync.processes.job import TinyJob, assert_nothing_lost, tiny_job
from tests.sync.server.access import TOKEN, Scripted, no_errors_logged, scripted, status, touchstone

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
        assert job.halted
        job.lost(job.open(Peer(said.append, lambda: None)))  # one that comes and goes meanwhile changes nothing
        while job.halted:
            await asyncio.sleep(0.05)
        again = job.open(Peer(said.append, lambda: None))
        job.receive(again, stranger.hello())
        assert not job.machine.halted
        assert job.machine.epoch > epoch + 5
        assert isinstance(m.decode(said[-1]), m.Hold | m.Welcome | m.RosterUpdate | m.Refuse)
        job.end()

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("where", ["tick", "receive", "lost"])
def test_a_machine_that_raises_is_followed_by_one_from_the_journal(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "_HALTED_S", 0.05)

    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    async def scene() -> None:
        job, replica = Job("j", Journal(None), ignore), Replica(Identity("j", "r0", {}, SETTINGS, "aa"))
        said: list[str] = []
        conn = job.open(Peer(said.append, lambda: None))
        job.receive(conn, replica.hello())
        machine = job.machine
        monkeypatch.setattr(machine, where, breaks)
        monkeypatch.setattr(machine, "deadline_s", lambda: 0.0)
        with pytest.raises(ZeroDivisionError):
            {"tick": job._ring, "receive": lambda: job.receive(conn, m.Leaving()), "lost": lambda: job.lost(conn)}[
                where
            ]()
        assert "a bug" in job.halted
        while job.halted:
            await asyncio.sleep(0.01)
        assert job.machine is not machine
        for text in said:
            message = m.decode(text)
            assert isinstance(message, m.FromCoordinator)
            replica.receive(message)
        job.receive(job.open(Peer(said.append, lambda: None)), replica.hello())
        assert job.machine.running
        job.end()

    asyncio.run(asyncio.wait_for(scene(), 60))


class FullDisk(Journal):
    """A journal in a file whose disk is full for some jobs: in the middle of the row."""

    def __init__(self, path: Path) -> None:
        self.full_for: set[str] = set()
        super().__init__(path)

    def _append(self, body: bytes) -> None:
        if json.loads(body)[0] in self.full_for:
            os.pwrite(self._fd, b"part of a row", self._end)
            self._cut = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._append(body)


def versions(path: Path, job: str, folder: Path | None = None) -> list[int]:
    """The decisions of a job that are on disk, as a crash would leave them."""
    copy = (folder or path.parent) / "copy"
    copy.write_bytes(path.read_bytes())
    journal = Journal(copy)
    try:
        saved = journal.load(job)
        return [d.version for d in saved.decided] if saved is not None else []
    finally:
        journal.close()


def test_a_transaction_that_fails_leaves_nothing_and_the_next_one_is_whole(tmp_path: Path) -> None:
    journal = FullDisk(tmp_path / "journal")
    decision = Decided(0, 0, 0, "d", "c", 0, ())
    journal.write("j", [Epoch(1), decision])
    journal.full_for = {"j"}
    for _ in range(2):
        with pytest.raises(
            JournalError, match=r"journal .*journal cannot be written .*No space.*; make room on its disk"
        ):
            journal.write("j", [Epoch(9), Known("r", 1)])
    journal.write("other", [Epoch(5)])
    saved = journal.load("j")
    assert saved is not None
    assert (saved.epoch, saved.roster, saved.decided) == (1, (), (decision,))
    journal.full_for.clear()
    journal.write("j", [Epoch(2)])
    journal.close()
    again = Journal(tmp_path / "journal").load("j")
    assert again is not None
    assert again.epoch == 2


async def _says_hello(replica: Scripted, machine: Replica) -> None:
    replica.machine = machine
    for effect in machine.connect():
        assert isinstance(effect, Send)
        await replica.send(effect.message)


async def _prepares(replica: Scripted, quorum: m.Quorum) -> None:
    for effect in replica.machine.reduced(0, quorum.attempt, "d", [[quorum.last_step]] * quorum.size):
        assert isinstance(effect, Send)
        await replica.send(effect.message)


async def _a_disk_is_full(path: Path, events: list[Event]) -> None:
    server = CoordinatorServer("127.0.0.1", 0, new=True, token=TOKEN, on_event=events.append)
    server._journal = journal = FullDisk(path)
    url = f"http://127.0.0.1:{await server.start()}"
    try:
        async with touchstone(url) as stone:
            async with scripted(url) as replica:
                await replica.join()
                assert await replica.outer_step() == 1
                machine = replica.machine
                for effect in machine.propose(m.Contribution(0, 1, 5, 10, 5.0)):
                    assert isinstance(effect, Send)
                    await replica.send(effect.message)
                quorum = await replica.until(m.Quorum)
                journal.full_for, ahead = {"job"}, server._jobs["job"].machine
                await _prepares(replica, quorum)
                assert await replica.receive() is None, "the connection ends, and nothing is sent"
            machine.disconnect()
            shown = (await status(url))[1]
            assert '"phase": "halted: the journal ' in shown
            assert '"job": "stone"' in shown
            assert ahead.rounds[0].at.version == 2, "the machine was ahead of the disk"
            for _ in range(3):  # the disk stays full for longer than a halt lasts
                async with scripted(url) as replica:
                    await _says_hello(replica, machine)
                    hold = await replica.receive()
                    assert isinstance(hold, m.Hold), hold
                    assert "make room on its disk" in hold.text
                    assert await replica.receive() is None
                machine.disconnect()
                await stone.check()
                await asyncio.sleep(job_module._HALTED_S)
            assert versions(path, "job") == [0, 1]
            assert [e.event for e in events].count("halt") == 1
            journal.full_for.clear()
            while server._jobs["job"].halted:
                await asyncio.sleep(0.01)
            async with scripted(url) as replica:
                await _says_hello(replica, machine)
                quorum = await replica.until(m.Quorum)
                assert quorum.version == 2
                assert quorum.last_step == 10, "the contribution that was not counted"
                await _prepares(replica, quorum)
                assert (await replica.until(m.Commit)).version == 2
            assert versions(path, "job") == [0, 1, 2]
    finally:
        await server.stop()


def test_a_decision_that_is_not_on_disk_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job_module, "_HALTED_S", 0.05)
    with no_errors_logged(but="job job has halted"):
        asyncio.run(asyncio.wait_for(_a_disk_is_full(tmp_path / "journal", []), 60))
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1, "said once"
    assert "make room on its disk" in errors[0].getMessage()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of half a megabyte; only root can make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def _told(job: TinyJob) -> int:
    """The highest version that any replica has committed."""
    return max(e["version"] for e in job.events("commit"))


def test_a_transaction_that_a_full_disk_cuts_off_is_not_there(tmp_path: Path, small_disk: Path) -> None:
    path = small_disk / "journal"
    journal = Journal(path)

    def decide(version: int) -> None:
        journal.write("j", [Decided(0, version, 0, "d" * 64, "c" * 64, version, (("r", 1, 1, 1, 1.0, True),) * 100)])

    journal.write("j", [Epoch(1)])
    version = 0
    for _ in range(3):
        filler = _fill(small_disk)
        with pytest.raises(JournalError, match=r"No space|I/O"):
            while True:  # what is allocated takes a few
                decide(version)
                version += 1
        with pytest.raises(JournalError):
            decide(version)
        filler.unlink()
        saved = journal.load("j")
        assert saved is not None
        assert [d.version for d in saved.decided] == versions(path, "j", tmp_path) == list(range(version))
        decide(version)
        version += 1
    journal.close()
    assert versions(path, "j", tmp_path) == list(range(version))


@pytest.mark.slow
def test_training_goes_on_when_a_full_disk_has_room_again(tmp_path: Path, small_disk: Path) -> None:
    with tiny_job(tmp_path, journal="disk/journal", steps=None) as job:
        job.start_all()
        job.until("decide", count=3)
        filler = _fill(small_disk)
        halt = job.until("halt")
        assert "No space" in halt["data"]["reason"]
        proposed = {name: job.after(halt, "hold", name)["inner_step"] for name in job.names}
        job.wait_until(
            lambda: all(_steps(job, name) > step + 100 for name, step in proposed.items()), "they train on alone"
        )
        assert _told(job) == max(versions(small_disk / "journal", "default", tmp_path))
        assert job.events("decide")[-1]["t_s"] < halt["t_s"]
        filler.unlink()
        for name in job.names:
            job.after(halt, "commit", name, count=2)
        job.enough()
        summary = job.end()
        assert len(job.events("halt")) == 1
        assert _told(job) == max(versions(small_disk / "journal", "default"))
    assert_nothing_lost(summary)
    assert summary["deaths"] == []


def _steps(job: TinyJob, name: str) -> int:
    lines = read_lines(RunFolder(job.folder).steps(name))
    return int(lines[-1]["inner_step"]) if lines else 0
