"""A job that starts anew or goes on, as its story and its report tell it."""

from __future__ import annotations

from typing import Any

import pytest

from ftopt.watch.report.lives import Lives
from ftopt.watch.story import Story


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
