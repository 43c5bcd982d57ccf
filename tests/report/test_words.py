"""Sentences of a report about spares, slow replicas, failed jobs, and replicas that nobody supervises."""

from __future__ import annotations

from pathlib import Path

from ftopt.report.run import read
from ftopt.report.timeline import timeline
from ftopt.report.words import log, story
from tests.report.recorded import Recorder, record


def told(path: Path) -> tuple[str, list[str]]:
    run = read(path, lambda text: None)
    return " ".join(story(run, timeline(run))), [text for _, text in log(run)]


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
    assert "s0, a spare, took the place of r1 at 0:04." in text
    assert "r0 was slow from 0:04 on, for 10.0\xa0s (3.8 times the usual step at first)" in text
    assert "; r2 was slow from 0:15 on, to its end (3.8 times" in text
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
    assert "r0 was slow from 0:04 on, to its end (3.8 times" in text
    assert "; r0 (incarnation 2) was slow from 1:54 on, for 5\xa0s (120 times" in text
    assert sum("is slow" in line for line in lines) == 2
    assert any("120 times as long as usual" in line for line in lines)


def test_a_job_that_a_loss_has_ended_is_told_of(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    for _ in range(2):  # once in each life of the coordinator
        run.event("job_failed", "r1", 1, inner_step=30, data={"reason": "it does not answer for 3 s", "versions": [3]})
    text, _ = told(tmp_path)
    assert text.count("The job failed at") == 1
    assert "r1 was lost, and sync.on_loss is fail (it does not answer for 3 s)." in text


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
    assert "cannot be accounted for" not in text


def test_who_was_lost_and_came_back_has_not_died(tmp_path: Path) -> None:
    run = recorded_without_a_runner(tmp_path)
    run.event("return", "r1", 1, version=2, inner_step=20)
    assert " died " not in told(tmp_path)[0]


def test_a_spare_stands_by_until_it_is_promoted(tmp_path: Path) -> None:
    recorded_without_a_runner(tmp_path)
    states = timeline(read(tmp_path, lambda text: None))
    assert "starting" not in {span.state for span in states["r0"]}
    names = [span.state for span in states["s0"]]
    assert "standing" in names and names.index("standing") < names.index("training")
