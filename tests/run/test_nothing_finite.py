"""A job of which nothing is finite comes to an end, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.running import Start, summary_of


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_steps_are_never_finite_fails_and_says_so(tmp_path: Path, start: Start, ranks: int) -> None:
    bad = ["inner.lr=1e30", "inner.schedule.warmup=0", "train.give_up_after=3", f"ranks={ranks}", "replicas=2"]
    status, said = start(tmp_path, *bad).wait()
    assert status == 1
    assert "ftopt: all replicas have left at inner step 0 of 600\n" in said
    assert "r0: the steps of 3 rounds in a row (train.give_up_after) were dropped, since parameters" in said
    summary = summary_of(tmp_path)
    assert summary["inner_steps_discarded"]["nonfinite"] == summary["inner_steps_executed"] > 0
    assert summary["deaths"] == [] and summary["survivor_inner_steps_lost"] == 0
