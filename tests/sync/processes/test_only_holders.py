"""The newest version is lost with the only replica that held it: the others train on, and the job goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ftopt
from ftopt.methods import Method
from ftopt.run.fault_spec import Fault
from tests.sync.processes.job import FAST, NOW, TinyJob, assert_nothing_lost, tiny_job

TWO = replace(FAST, start_replicas=2, evict_after_s=600.0)
STEPS = 50


def is_told(job: TinyJob, replica: str) -> dict[str, Any]:
    """Waits until a replica is told who held the version that is lost; returns the `hold`."""

    def told() -> list[dict[str, Any]]:
        return [e for e in job.events("hold", replica) if "newest version, and r1 may" in e["data"]["text"]]

    job.wait_until(lambda: bool(told()), f"{replica} is told")
    return told()[0]


def decides_alone(job: TinyJob, replica: str, since: dict[str, Any]) -> bool:
    """Whether a version since is the replica's alone; one that was prepared before may be another one's, too."""
    later = [e["data"]["members"] for e in job.events("decide") if e["t_s"] > since["t_s"]]
    return any([m[0] for m in members] == [replica] for members in later)


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [
        ftopt.DiLoCo(sync_every=20),
        ftopt.StreamingDiLoCo(sync_every=20, fragments=ftopt.fragments.Strided(n=2), delay=4),
    ],
)
def test_a_replica_that_was_late_trains_on_when_the_other_dies_with_what_it_has_committed_alone(
    tmp_path: Path, method: Method
) -> None:
    faults = {"r0": [Fault(point="inner", at_step=50, do="hang", for_s=5.0)], "r1": [Fault(point="serve", do="kill")]}
    policy = replace(TWO, recovery_s=12.0)  # time for steps
    with tiny_job(tmp_path, replicas=2, policy=policy, faults=faults, steps=None, method=method) as job:
        job.start_all()
        lost = job.until("lost", "r1")
        job.died("r1")
        job.wait_until(lambda: len(job.trained("r0", since=lost)) > STEPS, "r0 trains on")
        trained_s = job.trained("r0", since=lost)[STEPS]["t_s"]
        assert job.until("awaited")["data"]["for"] == ["r1"]
        told = is_told(job, "r0")
        back = job.after(lost, "rollback")
        assert trained_s < back["t_s"] and told["t_s"] < back["t_s"]
        job.after(back, "decide", count=4)
        job.enough()
        summary = job.end()
    assert_nothing_lost(summary)


@pytest.mark.long
def test_who_joins_meanwhile_is_told_and_trains_from_what_is_left(tmp_path: Path) -> None:
    with tiny_job(tmp_path, policy=replace(TWO, recovery_s=10.0), steps=None) as job:
        job.start("r0")
        job.start("r1")
        job.until("decide", count=3)
        job.order("r0", Fault(point=NOW, do="partition", for_s=100.0))
        struck = job.until("fault", "r0")
        job.wait_until(lambda: decides_alone(job, "r1", struck), "r1 commits alone")
        job.kill("r1")
        job.heal("r0")
        job.until("return", "r0")
        job.start("r2")
        told = is_told(job, "r2")
        back = job.after(told, "rollback")
        job.wait_until(
            lambda: any("r2" in [m[0] for m in e["data"]["members"]] for e in job.events("decide")), "r2 takes part"
        )
        assert len(job.events("fetch", "r2")) < 10
        job.after(back, "decide", count=2)
        job.enough()
        summary = job.end()
    assert_nothing_lost(summary)
