"""`policy.on_loss: fail`: a replica is lost, and the run ends with status 1, its checkpoint, figures and message."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftopt.watch.folder import RunFolder
from tests.run.running import CALM, Start, events_of, folder_of, summary_of

STRICT = ("policy.on_loss=fail", "train.inner_steps=600", "checkpoint.every=1", *CALM, "policy.dead_after_s=3")
DIES = "faults=[{replica: 1, at_step: 130, point: inner, do: kill, rejoin_s: null}]"


@pytest.mark.slow
def test_a_run_whose_replica_dies_ends_for_all_and_goes_on_when_it_is_resumed(tmp_path: Path, start: Start) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    status, said = start(first, *STRICT, DIES).wait()
    assert status == 1, said
    assert "ftopt: the job has failed, since r1 was lost (policy.on_loss=fail): it does not answer for 3 s" in said
    folder, summary = folder_of(first), summary_of(first)
    assert "to resume: ftopt resume " in (first / "stdout.txt").read_text(encoding="utf-8")
    (failed,) = events_of(first, "job_failed")
    assert (failed["replica"], failed["inner_step"]) == ("r1", summary["inner_step"])
    assert [death["replica"] for death in summary["deaths"]] == ["r1"]
    assert summary["survivor_inner_steps_lost"] == 0
    assert {e["replica"] for e in events_of(first, "end") if e["data"]["reason"] == "failed"} == {"r0", "r2"}
    for name in ("r0", "r2"):
        log = folder.log(name).read_text(encoding="utf-8")
        assert "ftopt: job 'diloco_bytes' has failed, since replica r1 was lost" in log
        assert "Traceback" not in log
    assert goes_on(start, second, folder) == 0
    assert summary_of(second)["inner_step"] >= 600 and events_of(second, "job_failed") == []


def goes_on(start: Start, folder: Path, run: RunFolder) -> int:
    """The exit status of a run that resumes the newest checkpoint of another one."""
    newest = max((run.path / "checkpoint").iterdir(), key=lambda path: path.stat().st_mtime)
    status, said = start(folder, *STRICT, f"checkpoint.resume={newest}").wait()
    assert status == 0, said
    return status
