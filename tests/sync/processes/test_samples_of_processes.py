"""The sample ledger with real processes: every sample is in exactly one commit, whichever replica dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftopt.run.fault_spec import Fault
from ftopt.sync.group import Samples
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines
from ftopt.watch.samples import Entry
from tests.recounted import recounted
from tests.sync.processes.job import FAST, TinyJob, assert_nothing_lost, tiny_job

SAMPLES = Samples(samples=2398, batch_size=4, epochs=1)
POLICY = replace(FAST, grace_s=0.3, evict_after_s=20.0)


def assert_every_sample_once(job: TinyJob, summary: dict[str, Any], samples: Samples = SAMPLES) -> None:
    assert samples.units is not None
    assert recounted(read_lines(RunFolder(job.folder).events)).entries() == [Entry(0, samples.units, 1)]
    assert summary["samples_committed"] == samples.count([(0, samples.units)])
    assert (summary["samples_duplicated"], summary["samples_lost"]) == (0, 0)


@pytest.mark.slow
def test_an_epoch_is_shared_out_and_its_short_batch_is_one_of_them(tmp_path: Path) -> None:
    samples = replace(SAMPLES, samples=1201)
    with tiny_job(
        tmp_path, samples=samples, policy=POLICY, steps=None, step_s={"r0": 0.002, "r1": 0.002, "r2": 0.01}
    ) as job:
        job.start_all()
        summary = job.end()
        assert_every_sample_once(job, summary, samples)
    assert_nothing_lost(summary)


@pytest.mark.long
@pytest.mark.parametrize(
    ("points", "journal"),
    [
        (("inner", "prepare"), "journal.sqlite"),
        pytest.param(("reduce", "commit"), "journal.sqlite", marks=pytest.mark.slow),
        pytest.param(("propose", "apply"), "", marks=pytest.mark.slow),
    ],
)
def test_kills_a_join_and_a_new_coordinator_leave_each_sample_in_one_commit(
    tmp_path: Path, points: Sequence[str], journal: str
) -> None:
    faults = {name: [Fault(point=p, at_step=40, do="kill")] for name, p in zip(("r1", "r2"), points, strict=True)}
    options = {"faults": faults, "journal": journal, "step_s": 0.02}  # the data last until r3 is there
    with tiny_job(tmp_path, samples=SAMPLES, policy=POLICY, steps=None, **options) as job:
        job.start_all()
        job.until("fault", "r1")
        job.died("r1")
        job.start("r1")
        job.names.append("r3")
        job.start("r3")
        job.until("propose", "r3")
        job.until("fault", "r2")
        job.died("r2")
        job.kill("coordinator")
        job.start_coordinator()
        job.until("recover")
        summary = job.end()
        assert_every_sample_once(job, summary)
    assert_nothing_lost(summary)
    assert len(summary["deaths"]) == 3
