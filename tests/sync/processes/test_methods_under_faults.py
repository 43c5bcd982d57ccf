"""Every method through a kill in the reduction, a late replica and a join, with real processes.

Methods that overlap have a fragment under way all the time: ``delay`` is longer than the gap between two fragments.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ftopt
from ftopt.methods import Method
from ftopt.run.fault_spec import Fault
from tests.sync.processes.job import TinyJob, assert_nothing_lost, tiny_job

THREE = ftopt.fragments.Balanced(n=3)
METHODS: dict[str, Method] = {
    "streaming": ftopt.StreamingDiLoCo(sync_every=12, fragments=THREE, delay=6),
    "streaming mixed": ftopt.StreamingDiLoCo(sync_every=12, fragments=THREE, delay=6, mix=0.5),
    "paft overlapped": ftopt.PAFT(sync_every=10, delay=1),
    "paft": ftopt.PAFT(sync_every=10),
    "sync_sgd": ftopt.SyncSGD(),
    "slowmo": ftopt.SlowMo(sync_every=10),
    "decoupled": ftopt.DecoupledDiLoCo(sync_every=12, fragments=THREE, delay=6),
    "foreign outer": ftopt.DiLoCo(sync_every=10, outer=ftopt.outer.Torch(cls="torch.optim.Adam", args={"lr": 1e-3})),
    "post-local": ftopt.DiLoCo(sync_every=10, average_until_step=30),
}
EVERYONE = pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, id=name, marks=[] if name == "streaming mixed" else pytest.mark.slow)
        for name, m in METHODS.items()
    ],
)
STEP_S = 0.01


def fragments(job: TinyJob, *replicas: str) -> set[int]:
    """Those with a decision of which one of ``replicas`` was a member."""
    return {e["fragment"] for e in job.events("decide") if any(m[0] in replicas for m in e["data"]["members"])}


def _settle(job: TinyJob) -> None:
    assert_nothing_lost(job.end())


@EVERYONE
def test_a_kill_in_the_reduction(tmp_path: Path, method: Method) -> None:
    faults = {"r1": [Fault(point="reduce", at_step=40, do="kill")]}
    with tiny_job(tmp_path, steps=None, step_s=STEP_S, method=method, faults=faults) as job:
        job.start_all()
        job.until("fault", "r1")
        job.died("r1")
        job.start("r1")
        job.until("propose", "r1", incarnation=2)
        job.enough(more=40)
        _settle(job)


@pytest.mark.slow
@EVERYONE
def test_a_late_replica(tmp_path: Path, method: Method) -> None:
    faults = {"r2": [Fault(point="inner", at_step=40, do="hang", for_s=1.5)]}
    with tiny_job(tmp_path, steps=None, step_s=STEP_S, method=method, faults=faults) as job:
        job.start_all()
        hung = job.until("fault", "r2")
        job.after(hung, "apply", "r2", count=3)
        job.enough(more=40)
        _settle(job)


@pytest.mark.long
@EVERYONE
def test_a_join(tmp_path: Path, method: Method) -> None:
    with tiny_job(tmp_path, steps=None, step_s=STEP_S, method=method) as job:
        job.start_all()
        job.until("decide", at_step=30)
        job.names.append("r3")
        job.start("r3")
        job.until("apply", "r3", count=4)
        job.wait_until(lambda: fragments(job, "r3") == fragments(job, *job.names), "it contributes to every fragment")
        job.enough(more=40)
        _settle(job)
