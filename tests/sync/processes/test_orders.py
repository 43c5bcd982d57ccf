"""What a test orders of a running job strikes, whatever the process is doing when it is ordered."""

from __future__ import annotations

from pathlib import Path

from ftopt.run.fault_spec import Fault
from tests.sync.processes.job import NOW, tiny_job


def test_faults_that_are_ordered_before_their_process_has_joined_strike_in_it(tmp_path: Path) -> None:
    with tiny_job(tmp_path, steps=None) as job:
        job.start_all()
        job.until("decide")
        job.kill("r2")
        second = job.start("r2")
        job.order("r2", Fault(point=NOW, do="partition", for_s=0.2))  # needs what there is only later
        job.order("r2", Fault(point="reduce", do="kill"))
        job.wait_until(lambda: not second.is_alive(), "the second r2 dies")
        assert second.exitcode == -9
    struck = [(e["data"]["do"], e["data"]["point"]) for e in job.events("fault", "r2")]
    assert struck == [("partition", "inner"), ("kill", "reduce")]
