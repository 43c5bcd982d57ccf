"""A run says what takes long."""

from __future__ import annotations

import threading

from ftopt.run.stages import Stages
from ftopt.watch.sentences import Note


def test_what_goes_on_for_more_than_a_second_is_said_once() -> None:
    now, said = [0.0], list[str]()
    stages = Stages(lambda note: said.append(note.text), lambda: now[0])
    for at_s in (0.0, 0.9, 1.1, 5.0):
        now[0] = at_s
        stages.going_on("exit", f"waiting at {at_s:g} s")
    stages.going_on("other", "just begun")
    assert said == ["waiting at 1.1 s"]
    for at_s in (0.0, 4.9, 5.0):
        now[0] = at_s
        stages.going_on("start", f"starting at {at_s:g} s", after_s=5.0)
    assert said == ["waiting at 1.1 s", "starting at 5 s"]


def test_work_of_the_same_thread_is_said_while_it_lasts() -> None:
    told = threading.Event()
    said = list[Note]()
    stages = Stages(lambda note: (said.append(note), told.set()))
    with stages.during("summing up"):
        assert told.wait(30.0)
    with stages.during("something short"):
        pass
    assert [note.text for note in said] == ["summing up"]
