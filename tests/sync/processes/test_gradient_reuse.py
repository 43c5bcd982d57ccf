"""A replica that dies costs its own micro-batches only: real processes, SIGKILL, and the gradient of the full batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftopt.data.batches import Batches
from ftopt.faults.spec import Fault
from ftopt.sync.group import Samples, Sync
from tests.sync.processes.job import Points, TinyJob, assert_nothing_lost, tiny_job, tiny_model, together_loss
from tests.sync.protocol.batch_table import batch

PATIENT = Sync(
    grace_s=20.0, heartbeat_s=0.2, dead_after_s=10.0, start_s=60.0, recovery_s=20.0, gone_after_s=60.0, start_replicas=3
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
    """Every step of every replica was taken with the gradient of the full batch."""
    told = [event["data"] for event in job.events("gradient")]
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


@pytest.mark.parametrize(
    ("point", "again"),
    [
        pytest.param("inner", 8, id="before the reduction"),
        pytest.param("reduce", 8, id="in the reduction"),
        pytest.param("commit", 0, id="after the reduction"),
    ],
)
def test_one_of_three_is_killed_and_only_its_samples_are_computed_again(tmp_path: Path, point: str, again: int) -> None:
    faults = {"r1": [Fault(point=point, at_step=AT, do="kill")]}
    with tiny_job(tmp_path, steps=STEPS, sync=PATIENT, samples=THREE_TIMES_EIGHT, faults=faults) as job:
        job.start_all()
        struck = job.until("fault", "r1")
        job.died("r1")
        summary = job.end()
        version = struck.get("version", AT)  # the first reduction may begin before the step is reported
        assert computed(job, version) == {"r0": 8 + again // 2, "r1": 8, "r2": 8 + again // 2}
        assert_full_batches(job, THREE_TIMES_EIGHT)
        decided = job.events("decide")
    assert_nothing_lost(summary)
    assert [e["version"] for e in decided] == list(range(1, STEPS + 1))
    assert [e["data"]["done_to"] for e in decided] == [6 * version for version in range(1, STEPS + 1)]


def test_four_micro_batches_over_three_replicas_one_of_which_is_killed_and_comes_back(tmp_path: Path) -> None:
    samples = Samples(samples=600, batch_size=4, global_batch=16)
    faults = {"r0": [Fault(point="inner", at_step=AT, do="kill")]}
    with tiny_job(tmp_path, steps=None, sync=PATIENT, samples=samples, faults=faults) as job:
        job.start_all()
        job.until("fault", "r0")
        job.died("r0")
        job.start("r0")
        job.until("gradient", "r0", incarnation=2, count=2)
        job.enough(more=2)
        summary = job.end()
        assert sum(computed(job, AT).values()) == 16 + 8, "two of the four micro-batches were r0's"
        assert_full_batches(job, samples)
        last = max(e["version"] for e in job.events("decide"))
        assert set(computed(job, last)) == {"r0", "r1", "r2"}, "the successor has a share"
        assert sum(computed(job, last).values()) == 16
    assert_nothing_lost(summary)
