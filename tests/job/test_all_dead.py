"""All replicas of a job die, and are started again: the job goes on from its newest checkpoint by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftopt.faults.spec import Fault
from tests.job.running import Start, events_of, summary_of
from tests.job.test_every_sample_once import as_override

_SETTINGS = ("method.sync_every=5", "checkpoint.every=1", "data.sampling=once", "data.epochs=1", "replicas=2")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rejoin_s", [(0.0, 0.0), (0.5, 3.0)])
def test_started_again_the_job_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, start: Start, rejoin_s: tuple[float, float]
) -> None:
    faults = [
        Fault(replica=index, at_step=at, point="inner", do="kill", rejoin_s=rejoin_s[index], incarnation=life)
        for life, at in ((1, 42), (2, 82))
        for index in range(2)
    ]
    run = start(tmp_path, *_SETTINGS, "train.inner_steps=1000000", as_override(faults), leave_out="replicas")
    status, error = run.wait(200)
    assert status == 0, error
    assert len(events_of(tmp_path, "death")) == 4
    restored = events_of(tmp_path, "restore")
    assert restored and all(event["version"] > 0 for event in restored)
    assert len(events_of(tmp_path, "start")) == 1, "a cold start"
    summary = summary_of(tmp_path)
    assert summary["survivor_inner_steps_lost"] == summary["inner_steps_counted_twice"] == 0
    assert summary["samples_duplicated"] == summary["samples_lost"] == 0
    assert summary["chain_conflicts"] == []
