"""What a run looks like while it goes."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from ftopt.events import Event
from ftopt.watch.narrator import JobsLog, Screen
from ftopt.watch.sentences import Note, names
from ftopt.watch.story import Story
from ftopt.watch.terminal import LiveTable, PlainLines, draw, figures


def event(name: str, replica: str = "r0", t_s: float = 0.0, life: int = 1, **more: Any) -> dict[str, Any]:
    return {"t_s": t_s, "event": name, "replica": replica, "incarnation": life, **more}


def line(step: int, t_s: float, **more: Any) -> dict[str, Any]:
    return {"t_s": t_s, "incarnation": 1, "inner_step": step, "loss": 2.0, **more}


def decide(version: int, inner_step: int, t_s: float = 0.0) -> dict[str, Any]:
    return event("decide", "coordinator", t_s, 0, fragment=0, version=version, inner_step=inner_step)


def running(replicas: int, steps: int = 40) -> Story:
    """So many replicas, 4 steps a second."""
    view = Story(600, name="diloco_bytes")
    for number in range(replicas):
        name = f"r{number:02d}"
        view.take(event("spawn", name, 0.0, 0, data={"life": 1}))
        view.take(event("join", name, 1.0, inner_step=0))
        for step in range(1, steps + 1):
            view.stepped(name, line(step, 1.0 + step / 4, tokens=1024))
    return view


def drawn(view: Story, width: int, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(draw(view, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


class Noted:
    """A `Display` that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.views: list[Story] = []
        self.closed = threading.Event()

    def note(self, note: Note) -> None:
        self.notes.append(note)

    def refresh(self, view: Story) -> None:
        self.views.append(view)

    def close(self) -> None:
        self.closed.set()


def test_the_view_follows_events_and_steps() -> None:
    view = Story(600)
    view.take(event("join", inner_step=0))
    for step in range(1, 4):
        view.stepped("r0", line(step, step * 0.5, tokens=64))
    view.take(event("propose", t_s=2, version=1))
    view.take(decide(1, 3, 2))
    row = view.row("r0")
    assert row.tokens_per_s == 128.0
    assert (row.state, row.inner_step, row.loss, row.steps_per_s) == ("waiting", 3, 2.0, 2.0)
    assert (view.version, view.inner_step) == (1, 3)
    view.take(event("apply", t_s=3, version=1))
    assert (row.state, row.version) == ("training", 1)


def test_notable_events_are_sentences_and_the_same_word_is_said_once() -> None:
    view = Story(600)
    death = event("death", "r1", 1, 2, data={"status": "SIGKILL"})
    assert view.take(death) == Note("r1 (incarnation 2) died (SIGKILL)", "bad")
    hold = event("hold", t_s=1, life=0, data={"text": "1 of 4"})
    assert view.take(hold) == Note("1 of 4")
    assert view.take({**hold, "replica": "r2"}) is None


def test_what_a_start_waits_for_is_told_once_though_each_replica_hears_it_at_its_own_time() -> None:
    view = Story(600)
    told = []
    for replica, text in (
        ("r0", "1 of 3 replicas connected; the job starts in 60 s at most"),
        ("r1", "2 of 3 replicas connected; the job starts in 59 s at most"),
        ("r0", "2 of 3 replicas connected; the job starts in 58 s at most"),
        ("r1", "1 of 3 replicas connected; the job starts in 57 s at most"),
        ("r0", "1 of 3 replicas connected; the job starts in 56 s at most"),
    ):
        if note := view.take(event("hold", replica, t_s=1, life=0, data={"text": text})):
            told.append(note.text[:6])
    assert told == ["1 of 3", "2 of 3"]
    view.take(event("decide", "coordinator", version=1, inner_step=50))
    again = event("hold", t_s=2, life=0, data={"text": "1 of 3 replicas connected; the job starts in 60 s at most"})
    assert view.take(again) is not None  # after an outer step it is another start
    assert view.take(event("propose", t_s=1)) is None
    back = event("return", "r1", 2, 2, version=7, inner_step=140)
    assert view.take(back) == Note("r1 (incarnation 2) goes on; the job is at version 7, inner step 140", "good")


def test_checkpoints_that_fail_are_told_once_until_one_succeeds() -> None:
    view = Story(600)
    failed = event("checkpoint_failed", t_s=1, data={"reason": "full"})
    said = [view.take(failed), view.take({**failed, "replica": "r1"}), view.take(failed)]
    assert said == [Note("r0: no checkpoint: full", "bad"), None, None]
    assert view.take({**failed, "event": "checkpoint", "data": {}}) is None
    assert view.take(failed) == Note("r0: no checkpoint: full", "bad")


def test_what_a_hello_reports_as_gone_is_no_news() -> None:
    view = running(2)
    assert view.take(event("gone", "r01", 3, data={"reason": "reported by r01, gone before"})) is None
    assert view.take(event("gone", "r01", 3, data={"reason": "away for 600 s"})) is not None


def test_replicas_that_an_interrupt_ends_while_they_start_are_not_dead() -> None:
    view = Story(600)
    for name in ("r0", "r1"):
        view.take(event("spawn", name, life=0, data={"life": 1}))
        assert view.take(event("end", name, 2.0, 0, data={"reason": "not_joined"})) is None
    assert view.states() == {"not joined": 2}


def test_replicas_that_only_a_checkpoint_knows_get_no_row() -> None:
    view = running(2)
    view.take(event("gone", "r07", 3, data={"reason": "left"}))
    view.take(event("lost", "r08", 3))
    assert sorted(view.rows) == ["r00", "r01"]


def test_when_all_leave_at_the_end_nothing_sounds_like_a_failure() -> None:
    """A run that was interrupted ended with "nobody holds version 5 any more"."""
    view = running(2)
    for name in ("r00", "r01"):
        view.take(event("end", name, 12, data={"reason": "done"}))
    left = [view.take(event("leave", name, 12)) for name in ("r00", "r01")]
    assert left == [Note("r00 left"), Note("r01 left")]
    assert view.take(event("gone", "r00", 12, data={"reason": "left"})) is None
    assert view.take(event("lost", "r01", 12)) is None
    assert view.take(event("rollback", "coordinator", 12, 0, fragment=0, version=5)) is None
    view = running(2)
    told = view.take(event("rollback", "coordinator", 12, 0, fragment=0, version=5))
    assert told == Note("no replica holds version 5 any more: the job goes back to what the replicas hold", "bad")


def test_a_round_that_waits_names_the_replicas_that_it_waits_for_once() -> None:
    view = running(3)
    for name in ("r00", "r01"):
        view.take(event("propose", name, 11.0, fragment=0, version=1))
    view.now_s = 12.0
    assert view.due() == []
    view.now_s = 26.0
    assert view.due() == [Note("version 1 has waited 15 s for r02 (no step for 15 s)", "warn")]
    assert view.due() == []


def test_a_coordinator_knows_it_by_those_that_it_has_called_in() -> None:
    view = Story(0)
    view.take(event("join", "r1", 1.0, inner_step=0))
    view.take(event("call_in", "r1", 5.0, fragment=0, version=1))
    view.now_s = 9.0
    assert view.due() == [Note("version 1 has waited 4 s for r1 (training)", "warn")]


def test_figures_are_the_jobs() -> None:
    view = running(2)
    view.take(decide(2, 40, 11))
    view.take(event("stall", "r00", 11, data={"stall_s": 1.95}))
    view.now_s = 11.0
    assert view.left_s() == pytest.approx(560 / 4, rel=0.05)
    told = "inner step 40/600 (7%), version 2, loss 2.000, 8.2k tokens/s, sync wait 10%, 2 training, 2:20 left"
    assert ", ".join(figures(view)) == told


def test_a_job_that_goes_on_from_a_checkpoint_starts_at_its_step() -> None:
    view = Story(600)
    view.take(event("recover", "coordinator", life=0, version=4, inner_step=200))
    assert figures(view)[:2] == ["inner step 200/600 (33%)", "version 4"]
    view.take(event("return", inner_step=200, version=4))
    assert (view.row("r0").inner_step, view.row("r0").version) == (200, 4)


def test_that_a_job_goes_on_is_not_told_after_its_replicas_are_back() -> None:
    view = Story(600)
    waits = view.take(event("hold", data={"text": "the job goes on from what its replicas hold: waiting for r1"}))
    view.take(event("recover", "coordinator", life=0, version=4, inner_step=200))
    assert waits is not None
    assert view.take(event("return", inner_step=200, version=4)) is not None
    assert view.take(event("hold", data={"text": "the job goes on from what its replicas hold"})) is None


def test_a_replica_that_leaves_with_an_error_is_told_once() -> None:
    view = running(2)
    assert view.take(event("leave", "r01", 12.0)) is None
    failed = event("death", "r01", 12.1, data={"status": "exit status 1"})
    assert view.take(failed) == Note("r01 left since it failed (exit status 1)", "bad")


def test_a_replica_that_leaves_in_good_order_is_told_once_whichever_of_its_events_comes_first() -> None:
    view = running(2)
    leave, end = ({"name": "leave"}, {"name": "end", "data": {"reason": "left"}})
    told = [view.take(event(replica="r00", **one)) for one in (end, leave)]
    told += [view.take(event(replica="r01", **one)) for one in (leave, end)]
    assert told == [None, Note("r00 left"), None, Note("r01 left")]
    view.take(event("join", "r02", inner_step=0))
    assert view.take(event("leave", "r02")) == Note("r02 left")  # a coordinator's log: nobody tells how it has ended


def test_small_losses_keep_their_digits_and_samples_without_tokens_are_samples() -> None:
    view = Story(600)
    for step in range(1, 4):
        view.stepped("r0", line(step, step * 0.5, loss=0.0001234, tokens=64, samples=64))
    assert figures(view)[2:4] == ["loss 0.0001234", "128 samples/s"]
    table = "\n".join(drawn(view, 100))
    assert "0.0001234" in table and "samples/s" in table and "tokens" not in table
    view.stepped("r0", line(4, 2.0, loss=31.5, tokens=64, samples=8))
    assert figures(view)[2:4] == ["loss 31.50", "128 tokens/s"]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("replicas", [2, 32])
def test_the_table_fits_the_terminal(width: int, replicas: int) -> None:
    view = running(replicas)
    view.now_s = 11.0
    view.take(event("death", f"r{replicas - 1:02d}", 11, data={"status": "SIGKILL"}))
    lines = drawn(view, width)
    assert len(lines) <= 22  # there is room for two notes above
    assert all(len(text) <= width for text in lines)
    assert "40/600 inner steps" in lines[0] and "left" in lines[0]
    dead = [text for text in lines if f"r{replicas - 1:02d}" in text]
    assert len(dead) == 1 and "dead" in dead[0]  # what is unusual is shown, whatever does not fit
    told = lines[-1].startswith("14 more replicas: 14 training; loss 2.000 to 2.000")
    assert told == (replicas == 32 and width == 80)


def test_colors_are_left_out_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://no-color.org"""
    found = []
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        monkeypatch.setenv("TERM", "xterm-256color")
        console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
        table = LiveTable(console)
        table.note(Note("r1 died", "bad"))
        table.refresh(running(2))
        table.close()
        assert isinstance(console.file, io.StringIO)
        found.append("\x1b[32m" in console.file.getvalue() or "\x1b[1;31m" in console.file.getvalue())
    assert found == [True, False]


def test_plain_lines_come_every_few_seconds_and_for_each_note() -> None:
    said: list[str] = []
    now = 0.0
    plain = PlainLines(said.append, clock=lambda: now)
    view = Story(600)
    view.row("r0")
    plain.refresh(view)
    assert said == []
    plain.note(Note("r0 joined"))
    now = 6.0
    plain.refresh(view)
    plain.refresh(view)
    assert len(said) == 2
    assert said[1].strip() == "6.0 s  inner step 0/600 (0%), version 0, 1 starting"
    for seconds in range(7, 60):
        now = float(seconds)
        plain.refresh(view)
    assert len(said) == 2  # nothing has changed


def test_a_storm_of_events_does_not_fill_the_log_and_quiet_tells_only_what_is_wrong() -> None:
    said: list[str] = []
    now = 0.0
    plain = PlainLines(said.append, clock=lambda: now)
    for _ in range(1000):
        plain.note(Note("version 3: an attempt failed", "warn"))
    now = 11.0
    plain.note(Note("r1 died", "bad"))
    assert len(said) == 32
    assert said[-2].endswith("... and 970 more events; events.jsonl has all of them")
    said.clear()
    quiet = PlainLines(said.append, clock=lambda: now, quiet=True)
    quiet.note(Note("r1 joined", "good"))
    quiet.note(Note("r1 died", "bad"))
    now = 100.0
    quiet.refresh(running(1))
    assert [text.split("s  ")[1] for text in said] == ["r1 died"]


def test_a_replicas_screen_shows_events_steps_and_its_log() -> None:
    display, view = Noted(), Story(600, whole=False)
    screen = Screen(view, display)
    screen(Event("hold", "r0", data={"text": "1 of 2"}))
    screen(Event("stepped", "r0", 1, inner_step=1))
    screen.stepped({"incarnation": 1, "inner_step": 1, "loss": 2.0})
    screen(Event("apply", "r0", 1, 0, 3, data={"counted_step": 20, "committed_step": 60}))
    screen(Event("discarded", "r0", 1, 0, data={"steps": 3, "reason": "nonfinite"}))  # the log says why
    log = logging.Logger("ftopt.test")
    log.addHandler(screen)
    log.warning("replica %s: training alone", "r0")
    screen.close()
    assert display.closed.wait(60)
    assert display.notes == [Note("1 of 2"), Note("replica r0: training alone", "warn")]
    assert (view.version, view.inner_step, view.row("r0").inner_step) == (3, 60, 1)
    assert display.views


def test_a_coordinator_tells_what_happens_in_each_job() -> None:
    display = Noted()
    log = JobsLog(display)
    log(Event("join", "r0", 1, inner_step=0, job="one"))
    log(Event("join", "r0", 3, inner_step=40, job="other"))
    log(Event("lost", "r0", 1, job="one"))
    log(Event("propose", "r0", 1, 0, 1, job="one"))
    log(Event("start", "coordinator", data={"undone": "the job had come to version 3"}, job="one"))  # the log says it
    log.close()
    assert display.closed.wait(60)
    assert [note.text for note in display.notes] == [
        "job one: r0 joined; the job is at inner step 0",
        "job other: r0 (incarnation 3) is back; the job is at inner step 40",
        "job one: the connection to r0 has ended",
    ]


@pytest.mark.parametrize(
    ("known", "told"), [("", ""), ("b", "b"), ("ba", "a and b"), ("abcdefghij", "a, b, c, d, e, f, g, h and 2 more")]
)
def test_names_are_listed_as_one_says_them(known: str, told: str) -> None:
    assert names(known) == told


def test_at_the_start_of_a_run_one_line_tells_that_all_are_connected() -> None:
    view = Story(10, whole=True)
    for name in ("r0", "r1"):
        view.take(event("spawn", name, inner_step=0))
    told = [view.take(event("join", name, 2.0, inner_step=0)) for name in ("r0", "r1")]
    told += [view.take(event("hold", "r0", 2.0, data={"text": "all 2 replicas are connected"}))]
    told += [view.take(event("join", "r1", 3.0, 2, inner_step=0)), view.take(event("join", "r2", 4.0, inner_step=0))]
    assert [note.text for note in told if note is not None] == [
        "all 2 replicas are connected",
        "r1 (incarnation 2) is back; the job is at inner step 0",
        "r2 joined; the job is at inner step 0",
    ]


def test_a_line_that_names_a_replica_only_by_its_id_says_which_life_it_is() -> None:
    told: Mapping[str, Any] = event("join", "r1", 3, 2, inner_step=140)
    assert Story(0).take(told) == Note("r1 (incarnation 2) is back; the job is at inner step 140", "good")


def test_a_replica_that_comes_back_says_how_long_it_was_away() -> None:
    view, back = Story(0), "r1 goes on; the job is at version 2, inner step 20"
    here = {"incarnation": 1, "version": 2, "inner_step": 20}
    view.take(event("join", "r1", 0, **here))
    view.take(event("lost", "r1", 3, **here))
    assert view.take(event("return", "r1", 10.5, **here)) == Note(f"{back}; it was away for 7.5 s", "good")
    assert view.take(event("return", "r1", 20, **here)) == Note(back, "good"), "the coordinator was started again"


def test_a_replica_that_has_not_joined_shows_no_figures_and_a_spare_shows_the_job() -> None:
    view = Story(600, whole=False)
    assert figures(view) == []
    spare = Story(600, whole=False, standby=True)
    line = {"t_s": 1.0, "event": "fetched", "replica": "s0", "incarnation": 1, "fragment": 0, "inner_step": 0}
    assert spare.take({**line, "version": 43, "data": {"committed_step": 430}}) is not None
    assert spare.take({**line, "version": 44, "data": {"committed_step": 440}}) is None
    assert figures(spare) == ["standing by: the job is at version 44, inner step 440"]
    spare.take({**line, "event": "fetch", "version": 45, "data": {}})
    assert drawn(spare, 80)[-1].split() == ["s0", "standby", "1", "440", "-", "0.0", "s", "44"]
    assert spare.take(event("promoted", "s0", data={"in_place_of": "r1"})) is not None
    assert spare.row("s0").state == "training"


def test_a_spare_is_no_replica_that_has_joined_or_is_waited_for() -> None:
    view = running(2)
    assert view.take(event("spare", "s0", 2.0)) == Note("s0 stands by")
    assert view.take(event("join", "s0", 2.0, inner_step=0)) is None
    view.take(event("lost", "s0", 3.0))
    view.take(event("return", "s0", 4.0, inner_step=0))
    assert view.row("s0").state == "standby"
    for name in ("r00", "r01"):
        view.take(event("propose", name, 11.0, fragment=0, version=1))
    view.now_s = 26.0
    assert view.due() == []


def test_a_slow_replica_shows_its_speed() -> None:
    view = running(1)
    view.take(event("slow", "r00", 11.0, data={"step_s": 0.25, "factor": 3}))
    assert drawn(view, 80)[-1].split()[:6] == ["r00", "slow", "40", "4", "4.1k", "2"]


def test_the_end_of_the_data_is_told_and_no_time_is_left_after_it() -> None:
    view = running(2)
    view.take(decide(2, 40, 11))
    view.take(event("epoch_done", "coordinator", 11, 0, data={"epoch": 0, "epochs": 3}))
    assert view.left_s() == pytest.approx((120 - 40) / 4, rel=0.05)
    told = view.take(event("data_ended", "coordinator", 11, 0, data={"units": 80, "epochs": 3}))
    assert told == Note("the data have ended after 3 epochs, at inner step 40 of 600", "warn")
    assert view.left_s() is None and not any("left" in part for part in figures(view))


def heard(at: int, loss: float | str | None = 2.5, planned: int = 0, state: str = "training") -> dict[str, Any]:
    """A job as ``GET /status`` shows it."""
    counts = {"planned": planned} if planned else None
    x = {"replica": "r0", "incarnation": 1, "state": state, "inner_step": at, "step_s": 0.5, "loss": loss}
    fragments = [{"version": 3, "inner_step": at // 10 * 10}]
    return {"job": "j", "phase": "running", "fragments": fragments, "replicas": [x | {"counts": counts}]}


def test_a_job_of_scripts_shows_the_figures_of_a_run_as_far_as_they_are_known() -> None:
    story = Story(0)
    story.take(event("spawn", "r0", 0.0, 0, data={"life": 1}))
    assert figures(story) == ["inner step 0", "version 0", "1 starting"]
    story.heard(heard(33))
    assert figures(story) == ["inner step 33", "version 3", "loss 2.500", "2.0 steps/s", "1 training"]
    for now_s, at in ((1.0, 40), (11.0, 60)):
        story.now_s = now_s
        story.heard(heard(at, None, planned=100))
    assert figures(story) == ["inner step 60/100 (60%)", "version 3", "2.0 steps/s", "1 training", "0:16 left"]
    story.heard(heard(60, "nan", planned=100, state="away"))
    assert figures(story)[2:4] == ["1 away", "0:16 left"]


def test_replicas_that_a_running_job_has_no_more_have_left() -> None:
    """A launch that has joined another's job hears of them by the coordinator's answers alone."""
    story = Story(0)
    for replica in ("b0", "b1"):  # its own processes; b1 has not joined yet
        story.take(event("spawn", replica, 0.0, 0, data={"life": 1}))
    job = heard(20)
    (r0,) = job["replicas"]
    story.heard(job | {"replicas": [r0, r0 | {"replica": "r1"}, r0 | {"replica": "b0"}]})
    assert "3 training" in figures(story) and "1 starting" in figures(story)
    story.take(event("lost", "r0", 1.0, 1))
    story.heard(job | {"replicas": [r0 | {"state": "away"}, r0 | {"replica": "b0"}]})
    assert figures(story)[-4:] == ["1 cut off", "1 left", "1 starting", "1 training"]
    story.heard(job | {"replicas": [r0, r0 | {"replica": "r1"}, r0 | {"replica": "b0"}]})
    assert "3 training" in figures(story), "they are back"


def test_near_the_end_no_time_left_is_told() -> None:
    """The last steps are taken before the outer step that ends the job."""
    story = Story(100)
    for now_s, at in ((0.0, 0), (10.0, 50), (19.0, 95)):
        story.now_s = now_s
        story.heard(heard(at))
        assert any(part.endswith("0:10 left") for part in figures(story)) == (at == 50)
    assert story.left_s() is not None and not any(part.endswith(" left") for part in figures(story))


def test_what_a_job_waits_for_takes_the_place_of_figures() -> None:
    said: list[str] = []
    at = [0.0]
    lines = PlainLines(said.append, clock=lambda: at[0])
    at[0] = 6.0
    lines.refresh(Story(0), lambda: "1 of 2 replicas connected")
    assert "1 of 2 replicas connected" in said[-1]
