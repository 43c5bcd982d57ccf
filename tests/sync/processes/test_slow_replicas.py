"""A replica of a real job becomes slow: it hears so itself, is called in early, and loses nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ftopt
from ftopt.run.fault_spec import Fault
from tests.sync.processes.job import FAST, NOW, assert_nothing_lost, tiny_job


@pytest.mark.slow
def test_a_slow_replica_hears_it_is_called_in_early_and_is_up_to_speed_again(tmp_path: Path) -> None:
    policy = replace(FAST, grace_s=20.0, heartbeat_s=0.05)  # a round that waited for it would last
    with tiny_job(tmp_path, policy=policy, method=ftopt.DiLoCo(sync_every=40), steps=None, logs=True) as job:
        job.start_all()
        job.until("decide", count=3)
        job.order("r2", Fault(point=NOW, do="slow", factor=8.0))
        told = [job.until("slow", "r2", count=1), job.until("slow", "r2", count=2)]  # of the coordinator, and its own
        assert [x["data"]["called_in"] for x in told] == [True, True]
        early = job.after(told[1], "call_in", "r2")
        job.after(early, "decide", count=2)
        job.order("r2", Fault(point=NOW, do="slow", factor=1.001))
        job.until("up_to_speed", "r2", count=2)
        job.enough()
        assert_nothing_lost(job.end())
