"""A job that starts anew or goes on, as its story and its report tell it."""

from __future__ import annotations

from typing import Any

import pytest

from ftopt.watch.report.lives import Lives
from ftopt.watch.story import Story
from ftopt.watch.terminal import figures


def line(t_s: float, event: str, replica: str = "coordinator", incarnation: int = 0, **data: Any) -> dict[str, Any]:
    version = data.pop("version", 0)
    place = {"replica": replica, "incarnation": incarnation, "version": version, "inner_step": 0}
    return {"t_s": t_s, "event": event, "data": data, **place}


def test_a_death_without_a_coordinator_is_not_before_the_last_outer_step_with_it() -> None:
    """A replica of another machine, whose process nobody here sees."""
    lives = Lives()
    counts = {"steps": 900, "pending": 0, "dropped": {}, "waited_s": 0.0, "sent": 0, "tokens": 0, "tested": None}
    counts |= {"tested_step": 0, "planned": 0, "waits": []}
    members = [[x, 1, 900, 900, 1.0, True] for x in ("r0", "w1")]
    for record in (
        line(0.0, "spawn", pid=1, life=1),
        line(0.0, "spawn", "r0", pid=2, life=1),
        line(1.0, "start", versions=[0], epoch=1),
        line(1.0, "join", "r0", 1),
        line(1.0, "join", "w1", 1),
        line(100.0, "decide", members=members, inner_step=900),
        line(100.0, "counts", counts={"r0": [1, counts], "w1": [1, counts]}),
        line(101.0, "spawn", pid=3, life=2),
        line(104.0, "recover", versions=[1], epoch=2),
        line(104.0, "return", "r0", 1),
        line(110.0, "gone", "w1", 1, reason="superseded by a newcomer"),
        line(110.0, "join", "w1", 2),
    ):
        lives.add(record)
    lives.close({})
    (death,) = lives.found
    assert death["t_s"] >= 100.0


@pytest.mark.parametrize("begins", ["start", "recover"])
def test_a_version_has_not_waited_since_before_the_job_began_again(begins: str) -> None:
    story = Story(0)
    members = [[x, 1, 1, 1, 1.0, True] for x in ("r0", "r1")]
    for record in (
        *(line(0.0, "spawn", x, pid=1) for x in ("r0", "r1")),
        line(10.0, "start", versions=[0]),
        *(line(10.0, "join", x, 1) for x in ("r0", "r1")),
        line(11.0, "call_in", "r1", 1, version=1),
        line(11.1, "decide", version=1, members=members),
        *(line(16.0, "death", x, 1, status="exit status 1") for x in ("r0", "r1")),
        *(line(16.0, "spawn", x, pid=2) for x in ("r0", "r1")),
        line(28.8, begins, versions=[0], undone="it starts anew"),
        *(line(28.8, "join", x, 2) for x in ("r0", "r1")),
    ):
        story.take(record)
    here = {"state": "fetching", "inner_step": 0, "incarnation": 2, "loss": None, "step_s": 0}
    replicas = [{"replica": x, **here} for x in ("r0", "r1")]
    story.heard({"replicas": replicas, "fragments": [{"version": 0, "inner_step": 0}]})  # type: ignore[typeddict-item]
    story.now_s = 29.1
    assert not [note.text for note in story.due()]


def status(version: int, *replicas: dict[str, Any]) -> dict[str, Any]:
    """A job as ``GET /status`` shows it."""
    return {"replicas": replicas, "fragments": [{"version": version, "inner_step": 50 * version}]}


def replica(name: str, loss: float, state: str = "training") -> dict[str, Any]:
    return {"replica": name, "incarnation": 1, "state": state, "inner_step": 100, "step_s": 0.05, "loss": loss}


def test_only_replicas_that_train_count_in_the_loss() -> None:
    """A joined launch goes on when those of the first one have left, by the answers of a restarted coordinator."""
    story = Story(0)
    story.heard(status(2, replica("r0", 14.9), replica("vm-r0", 2.0)))
    assert "loss 8.450" in figures(story)
    story.heard(status(3, replica("vm-r0", 2.0)))
    assert figures(story)[2:] == ["loss 2.000", "20.0 steps/s", "1 left", "1 training"]


def test_the_loss_at_the_end_is_that_of_the_replicas_that_came_to_it() -> None:
    story = Story(0)
    story.heard(status(2, replica("r0", 14.9), replica("r1", 2.0)))
    story.take(line(3.0, "leave", "r0", 1))
    story.take(line(4.0, "end", "r1", 1, reason="done"))
    assert story.loss() == 2.0


def test_a_replica_that_a_restarted_coordinator_knows_as_away_does_not_train() -> None:
    """It left while the launch heard nothing of the job; the journal has it as a replica."""
    story = Story(0)
    story.take(line(0.0, "spawn", "vm-r1", pid=1))  # of this launch, and not here yet
    story.heard(status(2, replica("r0", 14.9), replica("vm-r0", 2.0)))
    story.heard(status(2, *(replica(x, 14.9, "away") for x in ("r0", "vm-r1")), replica("vm-r0", 2.0)))
    assert figures(story)[2:] == ["loss 2.000", "20.0 steps/s", "1 away", "1 starting", "1 training"]
    story.heard(status(3, replica("r0", 2.5), replica("vm-r0", 2.0)))
    assert figures(story)[2:] == ["loss 2.250", "40.0 steps/s", "2 training", "1 starting"]
