"""A job's timer: the machine's `tick` comes when it is due, whatever else comes."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

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


def test_a_tick_comes_when_it_is_due_and_messages_do_not_put_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        job, ticked = Job("j", Journal(None), ignore), asyncio.Event()
        conn = let_in(job)
        due_s = [math.inf]

        def tick(now: float) -> list[Any]:
            assert now >= due_s[0]
            ticked.set()
            due_s[0] = math.inf
            return []

        monkeypatch.setattr(job.machine, "deadline_s", lambda: due_s[0])
        monkeypatch.setattr(job.machine, "tick", tick)
        for left_s in (-1.0, 0.0, 0.001, 3 * job_module._TICK_S, -1.0):
            due_s[0] = time.monotonic() + left_s
            ticked.clear()
            while not ticked.is_set():
                looks = job.machine.looks
                job.receive(conn, m.Leaving())
                assert job.machine.looks > looks
                assert ticked.is_set() or job._timer is not None
                await asyncio.sleep(0.001)
        while job._timer is not None:  # nothing is due any more
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(scene(), 60))


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
