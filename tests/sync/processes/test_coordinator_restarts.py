"""The coordinator comes back, and replicas that nobody expects are there first; real processes throughout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftopt.run.fault_spec import Fault
from tests.sync.processes.job import CALM, FAST, NOW, TinyJob, assert_nothing_lost, tiny_job


def restart_before(job: TinyJob, *newcomers: str) -> dict[str, Any]:
    """The coordinator comes back while all who live are cut off; the newcomers are there first. Returns the `hold` of
    the last one; the living are to be healed."""
    job.until("decide", at_step=60)
    for name in job.names:
        job.order(name, Fault(point=NOW, do="partition", for_s=100.0))
    before = [job.until("lost", name) for name in job.names][-1]  # a fault is on record before it strikes
    job.kill("coordinator")
    job.start_coordinator()
    for name in newcomers:
        job.start(name)
    return [job.after(before, "hold", name) for name in newcomers][-1]


@pytest.mark.parametrize("start_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_newcomers_that_are_there_before_the_living_do_not_start_the_job_anew(
    tmp_path: Path, start_replicas: int
) -> None:
    policy = replace(CALM, start_replicas=start_replicas)
    with tiny_job(tmp_path, steps=None, policy=policy) as job:
        job.start_all()
        living = list(job.names)
        restart_before(job, "r3", "r4")
        for name in living:
            job.heal(name)
        job.names += ["r3", "r4"]
        recovered = job.until("recover")
        for name in job.names:
            job.after(recovered, "commit", name)
        job.enough()
        summary = job.end()
        starts = job.events("start")
    assert recovered["version"] > 0
    assert len(starts) == 1
    assert_nothing_lost(summary)
    assert {death["replica"] for death in summary["deaths"]} == {"coordinator"}


@pytest.mark.long
@pytest.mark.parametrize("journal", [pytest.param("journal", marks=pytest.mark.slow), ""])
def test_a_second_process_of_an_id_does_not_take_the_place_of_the_living_one(tmp_path: Path, journal: str) -> None:
    """The supervisor was hasty; the coordinator restarts. The second process is turned away with the reason."""
    with tiny_job(
        tmp_path, steps=None, journal=journal, policy=replace(FAST, dead_after_s=10.0, recovery_s=30.0)
    ) as job:
        job.start_all()
        living = job.until("join", "r1")
        job.until("decide", at_step=60)
        first, living_orders = job.processes["r1"], dict(job.orders)
        restarted = restart_before(job, "r1")
        second, job.processes["r1"] = job.processes["r1"], first
        for name, orders in living_orders.items():
            job.orders[name] = orders
            job.heal(name)
        refused = job.until("refused", "r1")
        second.join(60)
        job.after(restarted, "commit", "r1", count=2)
        job.enough()
        summary = job.end()
        gone = [e for e in job.events("gone") if e["data"]["reason"] != "left"]
    assert "replica ids must be unique" in refused["data"]["text"]
    assert living["incarnation"] == 1
    assert gone == []
    assert_nothing_lost(summary)
    assert {death["replica"] for death in summary["deaths"]} == {"coordinator"}
