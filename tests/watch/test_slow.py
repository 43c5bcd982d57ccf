"""That a replica is slow is shown when it has lasted, as in the replica's own log."""

from __future__ import annotations

from typing import Any

import pytest

from ftopt.events import Event
from ftopt.watch import narrator
from ftopt.watch.narrator import JobsLog
from ftopt.watch.sentences import Note
from ftopt.watch.story import Story


class Kept:
    """A display that keeps its notes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, note: Note) -> None:
        self.texts.append(note.text)

    def refresh(self, view: Story) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrator, "_LOOK_S", 0.0)


def shown(*events: Event) -> list[str]:
    kept = Kept()
    log = JobsLog(kept)
    for event in events:
        log(event)
    log.close()
    return kept.texts


def slow(for_s: float) -> Event:
    return speed("slow", for_s)


def speed(name: str, for_s: float) -> Event:
    data: dict[str, Any] = {"factor": 3.0, "step_s": 0.3, "usual_s": 0.1, "for_s": for_s, "called_in": True}
    return Event(name, "r1", 1, data=data, job="j")


JOIN = Event("join", "r1", 1, inner_step=5, version=1, job="j")


def test_a_coordinators_log_says_nothing_of_a_hiccup() -> None:
    assert shown(JOIN, slow(2.0), speed("up_to_speed", 3.0)) == ["job j: r1 joined; the job is at inner step 5"]


def test_a_coordinators_log_says_that_a_replica_has_been_slow_for_long_and_that_it_is_up_to_speed_again() -> None:
    _, first, last = shown(JOIN, slow(16.0), Event("decide", "coordinator", job="j", version=2, inner_step=9),
                           speed("up_to_speed", 20.0))  # fmt: skip
    assert first.startswith("job j: r1 is slow: a step takes 0.3 s, 3 times as long as usual")
    assert last.startswith("job j: r1 is up to speed again")


def test_who_is_lost_while_it_is_slow_is_slow_no_more() -> None:
    texts = shown(JOIN, slow(2.0), Event("lost", "r1", 1, job="j"), speed("up_to_speed", 20.0))
    assert texts[:2] == ["job j: r1 joined; the job is at inner step 5", "job j: the connection to r1 has ended"]
    assert not [text for text in texts if "is slow" in text]
