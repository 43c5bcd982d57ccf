"""The last lines of a run: what a reader is told about the inner steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftopt.checkpoint.reader import Checkpoint, whole
from ftopt.cli.main import main
from ftopt.cli.run import end_is_saved, tell_offline_wandb
from ftopt.watch.account import closing_lines
from ftopt.watch.summary import summarize
from tests.checkpoint import parts


def summary(**changed: Any) -> dict[str, Any]:
    return summarize([], {}) | {"inner_steps_executed": 2215, "survivor_inner_steps_lost": 0} | changed


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"inner_steps_executed": 0}, "no inner step was taken"),
        ({}, "all 2,215 inner steps are in the model"),
        (
            {"inner_steps_committed": 2165, "dead_inner_steps_lost": 50},
            "of 2,215 inner steps, 2,165 are in the model, 50 were lost with replicas that died; survivors lost none",
        ),
        (
            {"inner_steps_inherited": 20, "inner_steps_committed": 2225, "inner_steps_pending": 3}
            | {"inner_steps_discarded": {"nonfinite": 7, "outlier": 0}},
            "of 2,215 inner steps and 20 that came from a checkpoint or a copy, 2,225 are in the model, 3 were in no "
            "outer step, 7 were dropped (the contribution was not finite); survivors lost no others",
        ),
        (
            {"inner_steps_committed": 2200, "inner_steps_pending": 15, "inner_steps_too_late": 12},
            "of 2,215 inner steps, 2,200 are in the model, 12 came too late for the last outer step, 3 were in no "
            "outer step; survivors lost no others",
        ),
        (
            {"inner_steps_committed": 2214, "survivor_inner_steps_lost": 1},
            "of 2,215 inner steps, 2,214 are in the model, 1 of survivors CANNOT BE FOUND, which must not happen: "
            "please report it",
        ),
        (
            {"inner_steps_committed": 2214, "dead_inner_steps_lost": 1, "survivor_inner_steps_lost": None},
            "of 2,215 inner steps of this replica, 2,214 are in the model, 1 was lost when its process died",
        ),
    ],
)
def test_the_run_says_in_words_where_every_inner_step_is(changed: dict[str, Any], line: str) -> None:
    assert line in closing_lines(summary(**changed))


def test_survivors_are_not_mentioned_where_nobody_survived() -> None:
    deaths = [{"t_s": 1.0, "replica": "r1", "incarnation": 1, "status": "SIGKILL"}]
    lines = closing_lines(summary(inner_steps_committed=2165, dead_inner_steps_lost=50, deaths=deaths))
    assert "of 2,215 inner steps, 2,165 are in the model, 50 were lost with replicas that died" in lines


def test_failed_attempts_joins_and_deaths_are_counted_in_words() -> None:
    deaths = [{"t_s": 1.0, "replica": "r1", "incarnation": 1, "status": "SIGKILL"}]
    lines = closing_lines(
        summary(outer_steps=12, attempts_aborted=1, inner_step=600, joins=[{}] * 5, deaths=deaths, wall_s=97.4)
    )
    assert "12 outer steps, with 1 failed attempt; the model is at inner step 600" in lines
    assert "5 joins, 1 death; the run took 97.4 s" in lines
    lines = closing_lines(summary(outer_steps=12, inner_step=638), asked=600)
    assert lines[0] == (
        "12 outer steps; the model is at inner step 638 (train.inner_steps=600: a job ends with an outer step)"
    )
    assert closing_lines(summary(outer_steps=12, inner_step=600), asked=600)[0].endswith("at inner step 600")
    lines = closing_lines(summary(ended_before_joining=2, wall_s=4.0))
    assert "2 replicas ended before joining, 0 joins, 0 deaths; the run took 4.0 s" in lines


def test_one_replica_says_in_how_many_outer_steps_it_took_part_and_that_its_time_has_a_death_in_it() -> None:
    own = {"survivor_inner_steps_lost": None, "outer_steps": 94, "inner_step": 18800, "wall_s": 61.1}
    lines = closing_lines(summary(**own))
    assert "took part in 94 outer steps; the model is at inner step 18800" in lines
    assert "61.1 s from the replica's first start to its end" in lines
    lines = closing_lines(summary(**own, deaths=[{"t_s": 20.0, "replica": "r1", "incarnation": 1}]))
    assert "61.1 s passed since the replica's first start, with 1 death and the time away" in lines


def test_what_wandb_kept_offline_is_uploaded_from_the_runs_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_offline_wandb(tmp_path)
    assert capsys.readouterr().out == ""
    (tmp_path / "wandb" / "offline-run-20260102_030405-r0").mkdir(parents=True)
    tell_offline_wandb(tmp_path)
    assert f"to upload: wandb sync {tmp_path}/wandb/offline-run-*\n" in capsys.readouterr().out


def test_the_held_out_loss_of_a_resumed_run_tells_where_it_was_first_evaluated() -> None:
    found = {"val_loss_initial": 0.085541, "val_loss_final": 0.05963, "val_accuracy_initial": 0.5}
    found |= {"val_accuracy_final": 0.75, "val_step_initial": 240, "val_step_final": 260}
    lines = closing_lines(summary(**found))
    assert "held-out loss 0.085541 (step 240) -> 0.059630 (step 260)" in lines
    assert "held-out accuracy 0.500 (step 240) -> 0.750 (step 260)" in lines
    assert "held-out loss 0.085541 -> 0.059630" in closing_lines(summary(**found | {"val_step_initial": 0}))
    assert "held-out loss 0.059630 (step 260)" in closing_lines(summary(**found | {"val_step_initial": 260}))


def test_a_run_whose_end_is_in_no_checkpoint_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts.writer(tmp_path)[0].write(parts.part())
    (checkpoint,) = whole(tmp_path)
    at = Checkpoint(checkpoint).manifest.inner_step
    assert end_is_saved(checkpoint, at)
    assert capsys.readouterr().err == ""
    assert not end_is_saved(checkpoint, at + 10)
    assert f"is of inner step {at}, and the end of the run, inner step {at + 10}, is in none" in capsys.readouterr().err
    assert not end_is_saved(None, 10)
    assert "there is no complete checkpoint, and the end of the run" in capsys.readouterr().err


@pytest.mark.parametrize(("end", "every", "status"), [(7, 5, 0), (17, 5, 1), (17, 0, 0)])
def test_the_exit_status_of_a_run_says_whether_its_end_is_saved(
    end: int, every: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.writer(tmp_path / "saved")[0].write(parts.part())
    (checkpoint,) = whole(tmp_path / "saved")
    end += Checkpoint(checkpoint).manifest.inner_step - 7

    class Done:
        def __init__(self, *_: object) -> None:
            pass

        def run(self) -> dict[str, Any]:
            return summarize([], {}) | {"inner_step": end}

        def newest_checkpoint(self) -> Path:
            return checkpoint

    monkeypatch.setattr("ftopt.run.runner.Runner", Done)
    monkeypatch.setattr("ftopt.cli.run._tell", lambda *_: None)
    assert main(["run", "diloco_bytes", f"log.dir={tmp_path}", f"checkpoint.every={every}"]) == status
