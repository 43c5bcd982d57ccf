"""A job's timer: the machine's `tick` comes when it is due, whatever else comes."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from ftopt.events import ignore
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.server import job as job_module
from ftopt.sync.server.job import Job, Peer
from ftopt.sync.server.journal import Journal


def let_in(job: Job) -> int:
    """The connection of its one replica."""
    conn = job.open(Peer(lambda text: None, lambda: None))
    job.receive(conn, Replica(Identity("j", "r0", {}, {"start_replicas": 1}, "aa")).hello())
    assert job.machine.running
    return conn


def test_messages_do_not_put_off_what_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    due_s = [time.monotonic()]

    async def scene() -> None:
        job = Job("j", Journal(None), ignore)
        conn = let_in(job)
        monkeypatch.setattr(job.machine, "deadline_s", lambda: due_s[0])

        def at_s() -> float:
            looks = job.machine.looks
            job.receive(conn, m.Leaving())
            assert job.machine.looks > looks
            assert job._timer is not None
            return job._timer.when()

        overdue = at_s()
        assert [at_s() for _ in range(5)] == [overdue] * 5
        due_s[0] = time.monotonic() + 60.0
        later = at_s()
        assert later == pytest.approx(due_s[0], abs=1.0)
        due_s[0] -= 30.0
        assert at_s() == pytest.approx(later - 30.0, abs=1.0)
        due_s[0] = math.inf
        job.receive(conn, m.Leaving())
        assert job._timer is None

    asyncio.run(scene())


def test_a_job_that_starts_anew_sets_its_timer_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "_HALTED_S", 0.01)

    async def scene() -> None:
        job = Job("j", Journal(None), ignore)
        let_in(job)
        job._halt("a test")
        halted = job._timer
        while job.halted:
            await asyncio.sleep(0.001)
        assert halted is not None
        monkeypatch.setattr(job.machine, "deadline_s", halted.when)  # as old as the timer that has rung
        conn = job.open(Peer(lambda text: None, lambda: None))
        job.receive(conn, Replica(Identity("j", "r0", {}, {"start_replicas": 1}, "aa")).hello())
        assert job._timer is not None
        assert job._timer is not halted
        job.end()

    asyncio.run(asyncio.wait_for(scene(), 60))
