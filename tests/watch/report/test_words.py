"""Sentences of a report about spares, slow replicas, failed jobs, and replicas that nobody supervises."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftopt.watch.report.figures import figures
from ftopt.watch.report.merge import merged
from ftopt.watch.report.record import read
from ftopt.watch.report.words import story
from tests.watch.report.recorded import Recorder, record


def told(path: Path) -> tuple[str, list[str]]:
    run = read(path, lambda text: None).runs(None)[0]
    return " ".join(story(run)), [text for _, text in run.fold.log.some()[0]]


def test_a_spare_that_takes_a_place_and_a_slow_replica_are_told_of_once(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    slow = {"factor": 3.8, "step_s": 0.38, "usual_s": 0.1, "before": 1.0, "for_s": 2.0, "called_in": True}
    run.event("spare", "s0", 1)
    run.event("join", "s0", 1, version=3, inner_step=30)
    for who in ("coordinator", "replica"):  # both tell it
        run.event("promoted", "s0", 1, data={"in_place_of": "r1"})
        run.event("slow", "r0", 1, data=slow | {"of": who})
    run.now += 10.0
    run.event("up_to_speed", "r0", 1, data={"factor": 1.0, "step_s": 0.1})
    run.event("up_to_speed", "r0", 1, data={"factor": 1.0, "step_s": 0.1})
    run.now += 1.0
    run.event("slow", "r2", 1, data=slow)
    text, lines = told(tmp_path)
    assert "At 0:04, s0 is promoted, and trains in the place of r1." in text
    assert "At 0:04, r0 is slow: a step takes 0.38 s, 3.8 times as long as usual; outer steps call it in early." in text
    assert "At 0:14, r0 is up to speed again" in text and "At 0:15, r2 is slow" in text
    assert sum("is promoted" in line for line in lines) == 1
    assert sum("is slow" in line for line in lines) == 2


def test_a_slow_replica_that_is_started_again_is_not_slow_in_between(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    slow = {"factor": 3.8, "step_s": 0.38, "usual_s": 0.1, "before": 1.0, "for_s": 2.0, "called_in": True}
    run.event("slow", "r0", 1, data=slow)
    run.now += 10.0
    run.event("join", "r0", 2, version=3, inner_step=30)
    run.now += 100.0
    run.event("slow", "r0", 2, data=slow | {"factor": 120.0})
    run.now += 5.0
    run.event("up_to_speed", "r0", 2, data={"factor": 1.0, "step_s": 0.1})
    text, lines = told(tmp_path)
    assert "At 0:04, r0 is slow: a step takes 0.38 s, 3.8 times as long as usual" in text
    assert "At 1:54, r0 (incarnation 2) is slow: a step takes 0.38 s, 120 times" in text
    assert sum("is slow" in line for line in lines) == 2
    assert any("120 times as long as usual" in line for line in lines)


def test_the_folder_of_a_launch_that_joined_a_job_names_the_other_one(tmp_path: Path) -> None:
    """It has heard of its processes alone."""
    run = Recorder(tmp_path)
    for life in (1, 2):
        run.event("spawn", "vm-r0", 0, data={"pid": life, "life": life})
    run.event("death", "vm-r0", 0, data={"status": "SIGKILL", "by_fault": False})
    text, _ = told(tmp_path)
    assert text.startswith("This is the folder of a launch that joined a job") and "did not come back" not in text


def test_a_resumed_job_says_where_it_went_on(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    lines = run.files.events.read_text().replace('"inner_step":0,', '"inner_step":7,')
    run.files.events.write_text(lines)
    assert "it went on from inner step 7 and came to inner step 30" in told(tmp_path)[0]


def test_a_job_that_a_loss_has_ended_is_told_of(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    for _ in range(2):  # once in each life of the coordinator
        run.event("job_failed", "r1", 1, inner_step=30, data={"reason": "it does not answer for 3 s", "versions": [3]})
    text, _ = told(tmp_path)
    assert text.count("the job has failed") == 1
    assert "At 0:04, the job has failed, since r1 was lost (policy.on_loss=fail): it does not answer for 3 s." in text


def recorded_without_a_runner(path: Path) -> Recorder:
    """The coordinator's events and those of r0, r1 and a spare, each begun with a `spawn` behind its `join`."""
    run = Recorder(path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    run.event("spare", "s0", 1)
    for replica in ("r0", "r1", "s0"):
        run.event("join", replica, 1, version=0, inner_step=0)
    run.now += 0.1  # the clocks of two machines differ
    for replica in ("r0", "r1", "s0"):
        run.event("spawn", replica, 1, data={"pid": 1, "life": 1, "job": "j"})
    for replica in ("r0", "r1"):
        run.event("started", replica, 1, version=0, inner_step=0, data={"start_step": 0})
        run.steps(replica, 1, 10)
    run.now += 1.0
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)})
    run.steps("r1", 11, 5)
    run.now += 0.6
    run.event("lost", "r1", 1)
    run.steps("r0", 11, 10)
    run.now += 1.0
    run.event("promoted", "s0", 1, data={"in_place_of": "r1"})
    run.event("started", "s0", 1, version=1, inner_step=10, data={"start_step": 10})
    run.steps("s0", 1, 10, job_step=10)
    run.now += 1.0
    run.round(2, {"r0": (1, 10, 20), "s0": (1, 10, 20)})
    return run


def test_who_was_lost_for_good_has_died_and_its_steps_with_it(tmp_path: Path) -> None:
    run = recorded_without_a_runner(tmp_path)
    for replica in ("r0", "s0"):
        run.end(replica)
    run.summarize()
    text, _ = told(tmp_path)
    assert "1 death: r1 died at" in text
    assert "5 were lost with replicas that died" in text
    assert "CANNOT BE FOUND" not in text


def test_who_was_lost_and_came_back_has_not_died(tmp_path: Path) -> None:
    run = recorded_without_a_runner(tmp_path)
    run.event("return", "r1", 1, version=2, inner_step=20)
    assert " died " not in told(tmp_path)[0]


def test_who_was_lost_and_resumes_its_checkpoint_as_the_same_incarnation_has_died_and_come_back(tmp_path: Path) -> None:
    run = recorded_without_a_runner(tmp_path)
    run.event("return", "r1", 1, version=1, inner_step=10, data={"resumed": True})
    run.event("resumed", "r1", 1, data={"pending_by_fragment": [0]})
    run.steps("r1", 11, 4)
    run.now += 0.5
    for replica, pending in (("r0", 0), ("s0", 0), ("r1", 4)):
        run.end(replica, pending=pending)
    run.summarize()
    text, _ = told(tmp_path)
    assert "1 death: r1 died at 0:02 (killed, crashed or cut off), and 2" in text
    assert "later its successor took its first inner step" in text
    assert "4 came too late for the last outer step, 5 were lost with replicas that died; survivors lost no" in text


def test_who_had_left_and_came_back_was_not_interrupted(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1"):
        run.event("join", replica, 1, version=0, inner_step=0)
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)})
    run.event("lost", "r0", 1)
    run.event("return", "r0", 1)
    run.event("leave", "r1", 1)
    run.event("return", "r1", 1)
    assert "The connection to r0 was lost, and came back." in told(tmp_path)[0]


def test_who_was_away_and_came_back_is_told_with_how_long(tmp_path: Path) -> None:
    run = recorded_without_a_runner(tmp_path)
    run.event("spawn", "coordinator", 0, data={"pid": 1, "life": 1})
    run.event("return", "r0", 1)  # to a coordinator that was started again
    for _ in range(2):
        run.event("lost", "r0", 1)
        run.now += 10.0
        run.event("return", "r0", 1)
    assert " The connection to r0 (20.0\xa0s) was lost, and came back." in told(tmp_path)[0]


def test_a_job_that_went_back_says_so(tmp_path: Path) -> None:
    run = recorded_without_a_runner(tmp_path)
    why = "the job goes back from version 2, inner step 20, which nobody who is here holds, to version 1"
    run.event("recover", version=1, inner_step=10, data={"epoch": 2, "versions": [1], "undone": why})
    assert f"At 0:04, {why}." in told(tmp_path)[0]


def test_a_spare_stands_by_until_it_is_promoted(tmp_path: Path) -> None:
    recorded_without_a_runner(tmp_path)
    states = read(tmp_path, lambda text: None).runs(None)[0].fold.states
    assert "starting" not in {span.state for span in states["r0"]}
    names = [span.state for span in states["s0"]]
    assert names[0] == "standing" and "training" in names and "starting" not in names


def job_of_three_folders(path: Path, *, lost: bool = True) -> list[Path]:
    """r1 dies at 1.6 s and trains again 14 s later, when it writes of that death; a spare takes its place. ``lost``:
    the coordinator is there to see it."""
    head, near, far = (Recorder(path / name) for name in ("head", "near", "far"))
    head.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    head.event("join", "r0", 1)
    head.event("join", "r1", 1)
    spawned = {"pid": 1, "life": 1, "time": 0.0, "job": "j"}
    for run, replica in ((near, "r0"), (far, "r1")):
        run.event("spawn", replica, 1, data=spawned)
        run.event("started", replica, 1, version=0, inner_step=0, data={"start_step": 0})
        run.steps(replica, 1, 15)
    near.event("spawn", "s0", 1, data=spawned | {"standby": True})
    for run in (head, near, far):
        run.now = 1.0
    members = {"r0": (1, 10, 10), "r1": (1, 10, 10)}
    head.round(1, members, here=[])
    near.round(1, members, here=["r0"], coordinator=False)
    far.round(1, members, here=["r1"], coordinator=False)
    head.now = 1.6
    if lost:
        head.event("lost", "r1", 1)
    near.now = 3.0
    near.event("promoted", "s0", 1, data={"in_place_of": "r1"})
    near.event("started", "s0", 1, version=1, inner_step=10, data={"start_step": 10})
    far.now = 15.601
    far.event("death", "r1", 1, data={"status": "unknown", "by_fault": False})
    far.event("spawn", "r1", 2, data=spawned | {"life": 2})
    far.event("started", "r1", 2, version=1, inner_step=10, data={"start_step": 10})
    head.now = 15.6
    head.event("join" if lost else "return", "r1", 2, version=1, inner_step=10)
    far.now = 15.7
    far.steps("r1", 1, 3, incarnation=2, job_step=10)
    far.now = 16.0
    far.end("r1", 2, pending=3)
    near.end("r0")
    return [run.files.path for run in (head, near, far)]


@pytest.mark.parametrize("lost", [True, False])
def test_who_died_was_dead_from_its_loss_to_its_next_life(tmp_path: Path, lost: bool) -> None:
    """Also when the coordinator was dead too: then from the last that it has told."""
    (run,) = merged([read(path, lambda text: None).runs(None)[0] for path in job_of_three_folders(tmp_path, lost=lost)])
    states = run.fold.states
    text = " ".join(story(run))
    assert "1 death: r1 died at 0:01 (killed, crashed or cut off), and 14." in text
    assert "later its successor took its first inner step" in text
    (dead,) = (span for span in states["r1"] if span.state == "dead")
    assert (round(dead.start, 1), round(dead.stop, 1)) == (1.6 if lost else 1.5, 15.8)


@pytest.mark.parametrize("claims", [True, False])
def test_a_script_that_resumes_was_dead_from_its_loss_until_it_is_back(tmp_path: Path, claims: bool) -> None:
    """The coordinator's folder is all there is; ``claims``: first as the incarnation that has died."""
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1"):
        run.event("join", replica, 1)
    run.now = 2.0
    run.event("lost", "r1", 1)
    run.now = 3.95
    if claims:
        run.event("return", "r1", 1, data={"resumed": True})
        run.event("lost", "r1", 1)
    run.now = 4.0
    run.event("join" if claims else "return", "r1", 2)
    run.now = 5.0
    run.event("lost", "r1", 2)
    run.now = 5.5
    run.event("return", "r1", 3)
    run.now = 6.0
    for replica, incarnation in (("r0", 1), ("r1", 3)):
        run.event("leave", replica, incarnation)
    (found,) = read(run.files.path, lambda text: None).runs(None)
    dead = [(x.start, x.stop) for x in found.fold.states["r1"] if x.state == "dead"]
    assert dead == [pytest.approx((2.0, 4.0), abs=0.1), pytest.approx((5.0, 5.5), abs=0.1)]
    assert found.fold.states["r1"].seconds["training"] == pytest.approx(3.5, abs=0.1)
    assert len(found.summary["deaths"]) == 2


def test_folders_without_the_coordinators_assert_no_death(tmp_path: Path) -> None:
    (run,) = merged([read(path, lambda text: None).runs(None)[0] for path in job_of_three_folders(tmp_path)[1:]])
    states = run.fold.states
    text = " ".join(story(run))
    assert "The record of r1 breaks off at 0:01 and goes on at 0:15." in text and "does not tell who died" in text
    assert " died at" not in text and not any(" died" in line for _, line in run.fold.log.some()[0])
    assert "dead" not in {span.state for spans in states.values() for span in spans}
    assert next(iter(states["s0"])).state == "standing"


def test_the_outer_optimizers_gain_and_memory_are_among_the_figures(tmp_path: Path) -> None:
    run = recorded_without_a_runner(tmp_path)
    data = {"start_step": 20, "outer_lr": 0.7, "outer_momentum": 0.9, "outer_gain": 7.0, "outer_memory": 500.0}
    run.event("started", "r9", 1, version=2, inner_step=20, data=data)
    found = figures(read(tmp_path, lambda text: None).runs(None)[0])
    assert found["outer rate, momentum"] == "0.7, 0.9"
    assert found["outer gain: rate / (1 - momentum)"] == "7"
    assert found["outer memory: period / (1 - momentum)"] == "500 inner steps"


def test_a_replica_whose_connection_was_lost_counts_as_stopped_until_it_is_back(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    run.event("lost", "r0", 1)
    run.now += 5.0
    run.event("return", "r0", 1)
    run.now += 1.0
    run.event("evaluate", "r0", 1)
    states = read(tmp_path, lambda text: None).runs(None)[0].fold.states
    assert states["r0"].seconds["struck"] == pytest.approx(5.0, abs=0.01)
    assert "struck" not in states["r2"].seconds
