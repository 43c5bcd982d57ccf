"""Partitions of a real network: replicas and coordinator as hosts of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.network.hosts import Hosts, hosts
from tests.sync.processes.job import FAST, TinyJob, assert_nothing_lost, tiny_job

pytestmark = pytest.mark.slow

NAMES = ("coordinator", "r0", "r1", "r2")
FAULTY_S = 3.0


@contextmanager
def job_of_hosts(folder: Path, **options: Any) -> Iterator[tuple[TinyJob, Hosts]]:
    with hosts(NAMES) as net:
        namespaces = {name: net.namespace(name) for name in NAMES}
        with tiny_job(folder, bind=net.address("coordinator"), namespaces=namespaces, steps=None, **options) as job:
            job.start_all()
            job.until("decide", count=2)
            yield job, net


def goes_on(job: TinyJob, since: dict[str, Any], *members: str) -> None:
    """Waits for a decision after ``since`` in which all of ``members`` have steps."""

    def does() -> bool:
        later = [e for e in job.events("decide") if e["t_s"] > since["t_s"]]
        return any(set(members) <= {m[0] for m in e["data"]["members"] if m[2] > 0} for e in later)

    job.wait_until(does, f"{members} take part")


def now(job: TinyJob) -> dict[str, Any]:
    return job.events("decide")[-1]


CUTS: dict[str, tuple[Callable[[Hosts], None], Callable[[Hosts], None]]] = {
    "link down": (lambda net: net.down("r1"), lambda net: net.up("r1")),
    "nothing from it": (lambda net: net.lose_from("r1"), lambda net: net.whole("r1")),
    "nothing to it": (lambda net: net.lose_to("r1"), lambda net: net.whole("r1")),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_replica_cut_off_is_missed_and_comes_back_with_its_work(tmp_path: Path, cut: str) -> None:
    break_it, mend_it = CUTS[cut]
    with job_of_hosts(tmp_path) as (job, net):
        before = now(job)
        break_it(net)
        lost = job.after(before, "lost", "r1")
        goes_on(job, lost, "r0", "r2")
        mend_it(net)
        back = job.after(lost, "return", "r1")
        goes_on(job, back, *NAMES[1:])
        job.enough()
        summary = job.end()
    assert_nothing_lost(summary)
    assert summary["deaths"] == []


@pytest.mark.parametrize("cut", ["link down", "nothing from it", "nothing to it"])
def test_the_coordinator_cut_off_stops_nobody_from_training(tmp_path: Path, cut: str) -> None:
    breaks = {
        "link down": lambda net: net.down("coordinator"),
        "nothing from it": lambda net: net.lose_from("coordinator"),
        "nothing to it": lambda net: net.lose_to("coordinator"),
    }
    with job_of_hosts(tmp_path) as (job, net):
        before = now(job)
        breaks[cut](net)
        for name in ("r0", "r1", "r2"):
            alone = job.after(before, "disconnected", name)
            job.after(alone, "stall", name)  # it is out of the round, and trains
        net.up("coordinator")
        net.whole("coordinator")
        job.after(before, "return", count=3)
        goes_on(job, now(job), *NAMES[1:])
        job.enough()
        summary = job.end()
    assert_nothing_lost(summary)
    assert summary["deaths"] == []


@pytest.mark.parametrize("ways", ["both ways", "one way"])
def test_two_replicas_cut_from_each_other_while_both_reach_the_coordinator(tmp_path: Path, ways: str) -> None:
    with job_of_hosts(tmp_path) as (job, net):
        before = now(job)
        net.cut("r1", "r2")
        if ways == "both ways":
            net.cut("r2", "r1")
        job.after(before, "abort", count=2)
        job.after(before, "decide", count=3)
        named = [e["data"]["reason"] for e in job.events("abort") if e["t_s"] > before["t_s"]]
        net.mend("r1", "r2")
        if ways == "both ways":
            net.mend("r2", "r1")
        mended = now(job)
        goes_on(job, mended, *NAMES[1:])
        lost = job.events("lost")
        job.enough()
        summary = job.end()
    assert_nothing_lost(summary)
    assert lost == [], "both are alive, and the coordinator knows"
    assert named


def test_a_reduction_that_saturates_the_link_lets_heartbeats_through(tmp_path: Path) -> None:
    policy = replace(FAST, heartbeat_s=0.5, dead_after_s=3.0)
    with job_of_hosts(tmp_path, policy=policy, width=250_000, step_s=0.02) as (job, net):
        before = now(job)
        for name in NAMES[1:]:
            net.rate(name, 50)
        job.after(before, "decide", count=3)
        rounds = [e for e in job.events("decide") if e["t_s"] > before["t_s"]]
        starts = {e["version"]: e["t_s"] for e in job.events("quorum")}
        took_s = [e["t_s"] - starts[e["version"]] for e in rounds]
        for name in NAMES[1:]:
            net.whole(name)
        job.enough()
        summary = job.end()
        lost, aborts = job.events("lost"), job.events("abort")
    assert max(took_s) > 2.0, "the link was the limit"
    assert lost == []
    assert aborts == []
    assert_nothing_lost(summary)
