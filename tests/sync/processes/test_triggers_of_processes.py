"""Triggers with real processes, sockets and Gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ftopt
from tests.sync.processes.job import CALM, assert_nothing_lost, tiny_job


def test_a_diverging_replica_brings_the_others_to_the_round(tmp_path: Path) -> None:
    """One replica trains at a higher rate; a grace of 200 s would keep its peers away. These take as many steps as they
    like meanwhile, and are nowhere near the threshold."""
    trigger = ftopt.triggers.AnyOf(
        [ftopt.triggers.LocalCondition(0.5, check_every=1), ftopt.triggers.LinearFDA(1e9, check_every=1)]
    )
    method = ftopt.LocalSGD(sync_every=100_000, trigger=trigger)
    policy = replace(CALM, grace_s=200.0, outlier_ratio=None)
    with tiny_job(tmp_path, method=method, policy=policy, steps=60, lr=1e-7) as job:
        job.start("r0")
        job.start("r1")
        job.start("r2", lr=2e-2)
        hurry = job.until("hurry", "r2")
        decided = job.after(hurry, "decide")
        summary = job.end()
        hurries = job.events("hurry")
        answered = [e for e in job.events("propose") if e["replica"] != "r2"]
    assert decided["t_s"] - hurry["t_s"] < 100.0
    assert [m[0] for m in decided["data"]["members"] if m[2] > 0] == ["r0", "r1", "r2"]
    assert answered
    assert {e["replica"] for e in hurries} == {"r2"}
    assert_nothing_lost(summary)
