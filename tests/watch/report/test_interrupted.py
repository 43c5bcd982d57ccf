"""What a report says of a run that a signal has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftopt.watch.report.figures import figures
from ftopt.watch.report.record import read
from ftopt.watch.report.run import Run
from ftopt.watch.report.words import story
from tests.watch.report.recorded import Recorder


def of_a_launch(path: Path, *, rounds: int = 1) -> Recorder:
    """Two replicas of a launch take 10 steps for each round, and 4 more."""
    run = Recorder(path)
    for replica in ("coordinator", "r0", "r1"):
        run.event("spawn", replica, data={"pid": 1, "life": 1})
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1"):
        run.event("join", replica, 1)
    for version in range(1, rounds + 1):
        run.now += 1.0
        run.round(version, {"r0": (1, 10, 10 * version), "r1": (1, 10, 10 * version)}, here=[])
    run.now += 1.0
    return run


def counts(steps: int, pending: int) -> dict[str, object]:
    return {"counts": {"steps": steps, "pending": pending, "dropped": {}, "waited_s": 0.0, "sent": 0, "planned": 300}}


def found(path: Path) -> tuple[Run, str]:
    run = read(path, lambda text: None).runs(None)[0]
    return run, " ".join(story(run))


@pytest.mark.parametrize("others", [[], ["vm-r0"], ["vm-r0", "vm-r1"]])
def test_an_interrupted_run_says_by_what_where_and_who_trains_on(tmp_path: Path, others: list[str]) -> None:
    run = of_a_launch(tmp_path)
    for replica in ("r0", "r1"):
        run.event("leave", replica, 1, data={"early": True, **counts(10, 0)})
    run.event("interrupted", data={"by": "Ctrl-C", "asked": ["r0", "r1"], "others": others})
    read_again, text = found(tmp_path)
    assert "it came to inner step 10. It was interrupted by Ctrl-C at inner step 10 of 300: r0 and r1 left. " in text
    on = {
        1: "vm-r0 of other launches trained on, and holds",
        2: "vm-r0 and vm-r1 of other launches trained on, and hold",
    }
    assert (f"{on[len(others)]} the model." in text) if others else "trained on" not in text
    assert "No replica died." in text and "still going on" not in text and "is lost" not in text
    assert read_again.ended and figures(read_again)["state"] == "interrupted"


@pytest.mark.parametrize("others", [[], ["vm-r0"]])
def test_a_job_has_run_until_its_last_replica_left(tmp_path: Path, others: list[str]) -> None:
    """The processes take their time to end; a job of which others train on has not ended."""
    run = of_a_launch(tmp_path)
    run.now = 27.0
    for replica in ("r0", "r1"):
        run.event("leave", replica, 1, data={"early": True, **counts(10, 0)})
    run.now = 34.0
    run.event("interrupted", data={"by": "SIGTERM", "asked": ["r0", "r1"], "others": others})
    read_again, text = found(tmp_path)
    ran = figures(read_again)["time"].replace("\N{NO-BREAK SPACE}", " ")
    assert f"The job ran for {ran}" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert ran.startswith("34" if others else "27")


def test_the_report_names_the_inner_step_of_the_signal_where_others_train_on(tmp_path: Path) -> None:
    run = of_a_launch(tmp_path, rounds=3)
    run.event("leave", "r0", 1, data={"early": True, **counts(14, 0)})
    run.event("interrupted", inner_step=14, data={"by": "Ctrl-C", "asked": ["r0"], "others": ["vm-r0"]})
    _, text = found(tmp_path)
    assert "it came to inner step 30. It was interrupted by Ctrl-C at inner step 14 of 300: r0 left." in text


@pytest.mark.parametrize(
    ("others", "untrained", "said"),
    [
        ([], ["vm-r0"], "vm-r0 of other launches had not begun to train."),
        (["vm-r0"], ["vm-r0"], "vm-r0 of other launches had not begun to train, and holds the model."),
        (
            ["vm-r0"],
            ["vm-r1", "vm-r2"],
            "vm-r0 of other launches trained on, and holds the model. vm-r1 and vm-r2 of other launches had not begun "
            "to train.",
        ),
    ],
)
def test_replicas_that_have_not_begun_to_train_have_not_trained_on(
    tmp_path: Path, others: list[str], untrained: list[str], said: str
) -> None:
    run = of_a_launch(tmp_path)
    for replica in ("r0", "r1"):
        run.event("death", replica, 1, data={"status": "SIGKILL", "by_fault": False, "by": "the second Ctrl-C"})
    run.event("interrupted", inner_step=10, data={"by": "Ctrl-C", "others": others, "untrained": untrained})
    _, text = found(tmp_path)
    assert said in text and text.count("of other launches") == said.count("of other launches")
    assert ("that model is lost" in text) == (not others)


@pytest.mark.parametrize("rounds", [0, 1])
def test_replicas_that_a_second_signal_kills_have_not_died_unexplained(tmp_path: Path, rounds: int) -> None:
    """Their pending steps are lost all the same."""
    run = of_a_launch(tmp_path, rounds=rounds)
    for replica in ("r0", "r1"):
        run.event("lost", replica, 1, data={**counts(10 * rounds + 4, 4), "unreported": 0})
    for replica in ("r0", "r1"):
        data = {"status": "SIGKILL", "by_fault": False, "by": "the second Ctrl-C"}
        run.event("death", replica, 1, data=data)
    run.event("interrupted", data={"by": "Ctrl-C", "again": "Ctrl-C", "asked": ["r0", "r1"]})
    read_again, text = found(tmp_path)
    where = f"at inner step {10 * rounds} of 300"
    assert f"It was interrupted by Ctrl-C {where}: r0 and r1 were killed by the second Ctrl-C." in text
    assert "No other replica died." in text and "died at" not in text and "still going on" not in text
    assert "8 were lost with replicas that were killed" in text
    summary = read_again.summary
    assert (summary["deaths"], len(summary["killed_at_the_end"]), summary["dead_inner_steps_lost"]) == ([], 2, 8)
    lines = [line for _, line in read_again.fold.log.some()[0]]
    assert "r0 was killed by the second Ctrl-C" in lines
    assert lines[-1] == "the run was interrupted by Ctrl-C, and a second Ctrl-C ended it at once"


def test_a_run_whose_coordinator_is_started_again_is_not_at_its_end(tmp_path: Path) -> None:
    run = of_a_launch(tmp_path)
    run.event("interrupted", data={"by": "Ctrl-C", "others": ["vm-r0"]})
    run.event("recover", version=1, inner_step=10, data={"epoch": 2})
    read_again, text = found(tmp_path)
    assert not read_again.ended and "interrupted" not in text
