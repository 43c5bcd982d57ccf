"""Replicas on CPUs of different kinds agree bit for bit: what all compute alike uses plain elementwise arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

import ftopt
from tests.sync.processes.job import CALM, assert_nothing_lost, tiny_job


def test_two_kernel_levels_and_different_thread_counts_hold_the_same_bits(tmp_path: Path) -> None:
    outer = ftopt.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)
    with tiny_job(
        tmp_path,
        method=ftopt.DiLoCo(sync_every=10, outer=outer),
        environ={"r1": {"ATEN_CPU_CAPABILITY": "default"}},
        threads={"r0": 1, "r1": 1, "r2": 2},
        width=4000,  # enough elements for a second thread to get some
        step_s=0.001,
        policy=CALM,
    ) as job:
        job.start_all()
        summary = job.end()
        kernels = {e["replica"]: e["data"] for e in job.events("kernels")}
        alarms = [e for e in job.events() if e["event"] in ("mismatch", "damaged", "evicted", "fork", "abort")]
    assert kernels["r1"]["cpu_capability"] == "DEFAULT" != kernels["r0"]["cpu_capability"]
    assert [kernels[name]["threads"] for name in ("r0", "r1", "r2")] == [1, 1, 2]
    assert summary["outer_steps"] >= 10
    assert alarms == []
    assert_nothing_lost(summary)


@pytest.mark.long
def test_replicas_that_take_each_step_alike_are_told_apart_at_the_start_and_made_equal_again(tmp_path: Path) -> None:
    """AdamW gives other bits under other kernels: nobody is at fault, and the drift does not add up."""
    with tiny_job(
        tmp_path,
        method=ftopt.SyncSGD(verify_every=10),
        environ={"r1": {"ATEN_CPU_CAPABILITY": "default"}},
        width=4000,
        steps=95,  # some ten more than versions: the last one is not compared, since the others would not serve it
        policy=CALM,
    ) as job:
        job.start_all()
        job.end()
        unlike, equalized = job.events("unlike"), job.events("equalized")
        alarms = [e for e in job.events() if e["event"] in ("mismatch", "diverged", "evicted", "fork")]
    names = {e["replica"] for e in unlike} | {name for e in unlike for name in e["data"]["others"]}
    assert "r1" in names and len(unlike) <= 2, "once for each that differs from those before it"
    assert len(equalized) >= 2
    assert all(e["data"] == {"of": ["r1"], "to": ["r0", "r2"]} for e in equalized)
    assert alarms == []
