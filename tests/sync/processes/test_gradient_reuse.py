"""A replica that dies costs its own micro-batches only: real processes, SIGKILL, and the gradient of the full batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ftopt
from ftopt.data.batches import Batches
from ftopt.run.fault_spec import Fault
from ftopt.sync.group import FaultPolicy, Samples
from ftopt.sync.protocol.intervals import size
from tests.forkserver import Flag
from tests.sync.processes.job import Points, TinyJob, assert_nothing_lost, tiny_job, tiny_model, together_loss
from tests.sync.protocol.batch_table import batch

PATIENT = FaultPolicy(
    grace_s=20.0,
    heartbeat_s=0.2,
    dead_after_s=10.0,
    start_s=60.0,
    recovery_s=20.0,
    evict_after_s=60.0,
    start_replicas=3,
)
THREE_TIMES_EIGHT = Samples(samples=600, batch_size=4, global_batch=24)
STEPS = 6
AT = 1
"""The step of the fault: nothing is measured yet, and shares are even."""


def gradients(samples: Samples, steps: int) -> list[torch.Tensor]:
    """Of one model that takes each global batch at once."""
    model, batches, found = tiny_model(), Batches(Points(samples.samples), samples), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for version in range(1, steps + 1):
        x = torch.cat([batches[unit] for start, stop in batch(samples, version) for unit in range(start, stop)])
        optimizer.zero_grad()
        together_loss(model, x).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return found


def assert_full_batches(job: TinyJob, samples: Samples) -> None:
    """Every step of every replica was taken with the gradient of the full batch. (One that was away has fetched the
    model behind its step instead.)"""
    told = [event["data"] for event in job.events("gradient") if event["data"]["gradient"]]
    expected = gradients(samples, max(data["version"] for data in told))
    for data in told:
        torch.testing.assert_close(torch.tensor(data["gradient"]), expected[data["version"] - 1], rtol=0, atol=1e-6)


def computed(job: TinyJob, version: int) -> dict[str, int]:
    """Samples that each replica has computed the gradients of, for one version."""
    found: dict[str, int] = {}
    for event in job.events("micro_batch"):
        if event["version"] == version:
            found[event["replica"]] = found.get(event["replica"], 0) + event["data"]["samples"]
    return found


def first_shares(job: TinyJob, version: int) -> dict[str, int]:
    """Samples that each replica was to compute for a version, before anybody was lost."""
    plan = next(event for event in job.events("plan") if event["version"] == version)
    return {name: size(share) * THREE_TIMES_EIGHT.batch_size for name, share in plan["data"]["shares"].items()}


@pytest.mark.parametrize(
    ("point", "again"),
    [
        pytest.param("inner", True, id="before the reduction"),
        pytest.param("reduce", True, id="in the reduction"),
        pytest.param("commit", False, id="after the reduction"),
    ],
)
def test_one_of_three_is_killed_and_only_its_samples_are_computed_again(
    tmp_path: Path, point: str, again: bool
) -> None:
    faults = {"r1": [Fault(point=point, at_step=AT, do="kill")]}
    with tiny_job(tmp_path, steps=STEPS, policy=PATIENT, samples=THREE_TIMES_EIGHT, faults=faults) as job:
        job.start_all()
        struck = job.until("fault", "r1")
        job.died("r1")
        summary = job.end()
        version = struck.get("version", AT)  # the first reduction may begin before the step is reported
        by, shares = computed(job, version), first_shares(job, version)
        assert by["r1"] == shares["r1"] > 0
        assert sum(by.values()) == 24 + (shares["r1"] if again else 0)
        assert all(by[name] >= shares[name] for name in ("r0", "r2")), "a survivor keeps what it has"
        assert_full_batches(job, THREE_TIMES_EIGHT)
        decided = job.events("decide")
    assert_nothing_lost(summary)
    assert [e["version"] for e in decided] == list(range(1, STEPS + 1))
    assert [e["data"]["done_to"] for e in decided] == [6 * version for version in range(1, STEPS + 1)]


def test_four_micro_batches_over_three_replicas_one_of_which_is_killed_and_comes_back(tmp_path: Path) -> None:
    samples = Samples(samples=600, batch_size=4, global_batch=16)
    faults = {"r0": [Fault(point="inner", at_step=AT, do="kill")]}
    with tiny_job(tmp_path, steps=None, policy=PATIENT, samples=samples, faults=faults, method=ftopt.SyncSGD()) as job:
        job.start_all()
        job.until("fault", "r0")
        job.died("r0")
        job.start("r0")
        job.until("micro_batch", "r0", incarnation=2)  # the successor has a share
        job.until("gradient", "r0", incarnation=2, count=4)
        job.enough(more=2)
        summary = job.end()
        assert sum(computed(job, AT).values()) == 16 + 8, "two of the four micro-batches were r0's"
        assert_full_batches(job, samples)
        last = max(e["version"] for e in job.events("decide") if not e["fragment"])
        assert sum(computed(job, last).values()) == 16
    assert_nothing_lost(summary)


def test_one_that_computes_a_dead_one_s_share_dies_too(tmp_path: Path) -> None:
    """The last one has all of the batch; what it had before both deaths it keeps. Nobody computes another one's share
    before both are dead."""
    faults, both = {"r1": [Fault(point="inner", at_step=AT, do="kill")]}, Flag()
    options = {"faults": faults, "method": ftopt.PAFT(sync_every=2, delay=1), "hold": (2, both)}
    with tiny_job(tmp_path, steps=STEPS, policy=PATIENT, samples=THREE_TIMES_EIGHT, **options) as job:
        job.start_all()
        job.until("fault", "r1")
        job.died("r1")
        job.until("plan", count=2)  # the others have its share
        job.kill("r2")
        both.set()
        summary = job.end()
        assert computed(job, AT)["r0"] == 24
        assert_full_batches(job, THREE_TIMES_EIGHT)
        kept = [e["data"] for e in job.events("micro_batch", "r0") if e["version"] == AT]
        assert sorted(data["units"][0][0] for data in kept if data["kept"]) == list(range(6)), "each once"
    assert_nothing_lost(summary)


@pytest.mark.long
@pytest.mark.parametrize("point", ["propose", "micro_batch"])
def test_one_that_was_stopped_for_long_comes_back_with_its_share_and_nothing_is_twice_in_the_model(
    tmp_path: Path, point: str
) -> None:
    """The others have computed its share meanwhile; it has offered its own, or is about to."""
    policy = replace(PATIENT, dead_after_s=1.5, grace_s=1.0)
    with tiny_job(tmp_path, steps=None, policy=policy, samples=THREE_TIMES_EIGHT, step_s=0.05) as job:
        job.start_all()
        job.until(point, "r1", count=3)
        job.order("r1", Fault(point="inner", do="stop", for_s=100.0))
        stopped = job.until("fault", "r1")
        lost = job.after(stopped, "lost", "r1")  # it may have been silent before, too
        job.until("decide", at_step=4)
        job.wake("r1")
        back = job.after(lost, "return", "r1")
        job.after(back, "gradient", "r1", count=3)
        job.enough(more=3)
        summary = job.end()
        assert_full_batches(job, THREE_TIMES_EIGHT)
        decided = job.events("decide")
        assert [e["version"] for e in decided] == list(range(1, len(decided) + 1))
        assert max(e["data"]["inner_step"] for e in decided if e["t_s"] < back["t_s"]) > 3, "the others went on"
    assert_nothing_lost(summary)
