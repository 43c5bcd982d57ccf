"""The report of a real run: processes, a kill, a return."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftopt.watch.report.record import read
from ftopt.watch.sentences import figure
from tests.run.running import CALM, Start, folder_of, summary_of
from tests.watch.report.recorded import page_of


@pytest.mark.long
@pytest.mark.timeout(300)  # five processes start
def test_a_run_ends_with_a_report_whose_figures_are_those_of_its_summary(tmp_path: Path, start: Start) -> None:
    fault = "faults=[{replica: 1, at_step: 25, point: reduce, do: kill, rejoin_s: 0}]"
    calm = (*CALM, "policy.min_replicas=3")  # the job's end waits for the one that comes back
    status, said = start(tmp_path, "train.inner_steps=60", "train.eval_every=20", fault, *calm).wait(250.0)
    assert status == 0, said
    files, summary = folder_of(tmp_path), summary_of(tmp_path)
    report = files.path / "report.html"
    assert f"report: {report.relative_to(tmp_path)}\n" in (tmp_path / "stdout.txt").read_text(encoding="utf-8")
    found = page_of(report)
    figures = found.figures()
    for said, name in (
        ("inner steps executed", "inner_steps_executed"),
        ("committed: in the model", "inner_steps_committed"),
        ("pending at the end", "inner_steps_pending"),
        ("lost with dead replicas", "dead_inner_steps_lost"),
        ("outer steps", "outer_steps"),
        ("attempts", "attempts"),
        ("samples in the model", "samples_committed"),
    ):
        assert figures[said] == f"{summary[name]:,}", said
    assert figures["final weights of 3 replicas"] == "identical"
    assert "1 death: r1 died at" in found.text
    first, last = (figure(summary[f"val_loss_{when}"], 5) for when in ("initial", "final"))
    assert f"Held-out loss {first} -> {last}" in found.text
    states = read(files.path, print).runs(None)[0].fold.states
    assert {"training", "waiting", "syncing"} <= {span.state for span in states["r0"]}
    assert {"dead", "starting", "training"} <= {span.state for span in states["r1"]}
    about = json.loads(files.about.read_text(encoding="utf-8"))
    assert about["python"] in found.text
    assert about["torch"] in found.text
