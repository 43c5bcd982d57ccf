"""What a run looks like while it goes."""

from ftopt.telemetry.progress import PlainLines
from ftopt.telemetry.sentences import Note
from ftopt.telemetry.view import RunView


def test_the_view_follows_events_and_steps() -> None:
    view = RunView(600)
    view.event({"t_s": 0, "event": "join", "replica": "r0", "incarnation": 1})
    for step in range(1, 4):
        view.stepped("r0", {"t_s": step * 0.5, "incarnation": 1, "inner_step": step, "loss": 2.0, "tokens": 64})
    view.event({"t_s": 2, "event": "propose", "replica": "r0", "incarnation": 1, "version": 1})
    view.event(
        {
            "t_s": 2,
            "event": "decide",
            "replica": "coordinator",
            "incarnation": 0,
            "fragment": 0,
            "version": 1,
            "inner_step": 3,
        }
    )
    row = view.row("r0")
    assert row.tokens_per_s == 128.0
    assert (row.state, row.inner_step, row.loss, row.steps_per_s) == ("waiting", 3, 2.0, 2.0)
    assert (view.version, view.inner_step) == (1, 3)
    view.event({"t_s": 3, "event": "apply", "replica": "r0", "incarnation": 1, "version": 1})
    assert (row.state, row.version) == ("training", 1)


def test_notable_events_are_sentences_and_the_same_word_is_said_once() -> None:
    view = RunView(600)
    death = {"t_s": 1, "event": "death", "replica": "r1", "incarnation": 2, "data": {"status": "SIGKILL"}}
    assert view.event(death) == Note("r1 (incarnation 2) died (SIGKILL)", "bad")
    hold = {"t_s": 1, "event": "hold", "replica": "r0", "incarnation": 0, "data": {"text": "1 of 4"}}
    assert view.event(hold) == Note("1 of 4")
    assert view.event({**hold, "replica": "r2"}) is None
    assert view.event({"t_s": 1, "event": "propose", "replica": "r0", "incarnation": 1}) is None


def test_checkpoints_that_fail_are_told_once_until_one_succeeds() -> None:
    view = RunView(600)
    failed = {"t_s": 1, "event": "checkpoint_failed", "replica": "r0", "incarnation": 1, "data": {"reason": "full"}}
    said = [view.event(failed), view.event({**failed, "replica": "r1"}), view.event(failed)]
    assert said == [Note("r0: no checkpoint: full", "bad"), None, None]
    assert view.event({**failed, "event": "checkpoint", "data": {}}) is None
    assert view.event(failed) == Note("r0: no checkpoint: full", "bad")


def test_plain_lines_come_every_few_seconds_and_for_each_note() -> None:
    said: list[str] = []
    now = 0.0
    plain = PlainLines(said.append, clock=lambda: now)
    view = RunView(600)
    view.row("r0")
    plain.refresh(view)
    assert said == []
    plain.note(Note("r0 joined"))
    now = 6.0
    plain.refresh(view)
    plain.refresh(view)
    assert len(said) == 2
    assert said[1].strip() == "6.0 s  inner step 0/600 (0%), version 0, 1 starting"
