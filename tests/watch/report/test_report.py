"""What a report shows of runs whose figures are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftopt.cli.main import main
from ftopt.watch.page import page as static_page
from ftopt.watch.page import report_page
from ftopt.watch.report.record import read
from ftopt.watch.report.sections import report
from tests.watch.report.recorded import Page, Recorder, numbers, page_of, record


def reported(*arguments: str | Path) -> int:
    return main(["report", *map(str, arguments)])


def test_the_report_lies_in_the_runs_folder_and_its_path_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run")
    assert reported(tmp_path / "run") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    page_of(tmp_path / "run" / "report.html")


def test_the_figures_are_those_of_the_summary(tmp_path: Path) -> None:
    record(tmp_path)
    assert reported(tmp_path) == 0
    found, summary = page_of(tmp_path / "report.html").figures(), numbers(tmp_path)
    assert found["inner steps executed"] == str(summary["inner_steps_executed"]) == "80"
    assert found["committed: in the model"] == str(summary["inner_steps_committed"]) == "70"
    assert found["lost with dead replicas"] == str(summary["dead_inner_steps_lost"]) == "10"
    assert found["lost by survivors"] == str(summary["survivor_inner_steps_lost"]) == "0"
    assert found["outer steps"] == str(summary["outer_steps"]) == "3"
    assert found["final weights of 2 replicas"] == "identical"


def test_the_first_sentences_tell_what_happened_and_what_it_cost(tmp_path: Path) -> None:
    record(tmp_path)
    assert reported(tmp_path) == 0
    text = page_of(tmp_path / "report.html").text
    for said in (
        "The job ran for 4.5 s, with 3 replicas, and committed 3 outer steps; it came to inner step 30.",
        "1 death: r1 died at 0:02 (SIGKILL, an injected fault) and did not come back.",
        "Of 80 inner steps, 70 (87.5 %) are in the model, 10 were lost with replicas that died; survivors lost none.",
        "the longest wait was 0.5 s",
        "The replicas sent 7 kB in reductions",
        "Held-out loss 5.5000 -> 2.2500 nats.",
    ):
        assert said in text, text[:2000]


def test_the_longest_wait_may_be_one_of_a_replica_that_died(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    run.event("stall", "r1", 1, data={"stall_s": 0.75})
    run.summarize()
    assert reported(tmp_path) == 0
    text = page_of(tmp_path / "report.html").text
    assert "for 0.5 s at the median; the longest wait was 0.75 s (r1, at " in text, text[:2000]


def test_every_moment_of_a_replica_is_in_one_state(tmp_path: Path) -> None:
    record(tmp_path)
    run = read(tmp_path, print).runs(None)[0]
    states = run.fold.states
    assert {name: round(sum(spans.seconds.values()), 3) for name, spans in states.items()} == dict.fromkeys(
        ("r0", "r1", "r2"), 4.5
    )
    assert {state: round(s, 3) for state, s in states["r0"].seconds.items()} == {
        "training": 3.0,
        "waiting": 0.6,
        "syncing": 0.9,
    }
    assert round(states["r1"].seconds["dead"], 3) == 2.0


def test_a_wait_that_death_ended_is_a_wait(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    run.event("join", "r0", 1)
    run.steps("r0", 1, 10)
    run.now = 1.0
    run.event("propose", "r0", 1, fragment=0, version=1)
    run.now = 3.0
    run.event("death", "r0", 1, data={"status": "SIGKILL"})
    run.now = 3.5
    run.event("lost", "r0", 1)
    assert read(tmp_path, print).runs(None)[0].fold.states["r0"].seconds == {
        "training": 1.0,
        "waiting": 2.0,
        "dead": 0.5,
    }


def test_each_picture_has_its_figures_as_a_table(tmp_path: Path) -> None:
    record(tmp_path)
    assert reported(tmp_path) == 0
    found = page_of(tmp_path / "report.html")
    assert found.table("inner step", "time", "held-out loss") == [["0", "0:00", "5.5000"], ["30", "0:04", "2.2500"]]
    (first, *_) = found.table("inner steps", "r0", "r1", "r2")
    assert first[0] == "1 to 3"
    assert [row[:4] for row in found.table("version", "time")][1] == ["2", "0:03", "20", "r0 10, r2 10"]
    assert ["r0", "3", "0.5 s", "0.5 s", "0.5 s", "1.5 s", "r2 0.6 s"] in found.table("replica", "waits")
    assert "Until all had proposed, they waited mostly for r2: 0.8 s." in found.text
    assert ["all", "7 kB"] in found.table("replica", "sent")
    assert "None of 7 contributions was stale." in found.text


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a&b;\u202eevil\x07"])
def test_what_a_run_calls_its_things_cannot_end_the_data(tmp_path: Path, name: str) -> None:
    run = record(tmp_path, ("r0", name.replace("/", "-"), "r2"))
    run.event("abort", fragment=0, version=4, data={"reason": name})
    run.files.recipe.write_text(f"</script>{name}", encoding="utf-8")
    run.files.about.write_text('{"torch": "<b>\\ud800"}', encoding="utf-8")
    assert reported(tmp_path) == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    known = static_page()[0].decode()
    for tag in ("<script", "</script", "<img", "<b>"):
        assert html.count(tag) == known.count(tag)
    found = Page(html)
    assert name.replace("/", "-").replace("\u202e", "\ufffd").replace("\x07", "\ufffd") in found.text
    assert "\u202e" not in found.text and "\\u202e" not in html


@pytest.mark.long
def test_many_replicas_and_steps_make_a_page_that_is_small(tmp_path: Path) -> None:
    names = [f"r{n}" for n in range(64)]
    run = Recorder(tmp_path)
    for name in names:
        run.event("join", name, 1)
    for version in range(1, 41):
        for name in names:
            run.steps(name, 10 * version - 9, 10)
        run.now += 1.0
        run.round(version, dict.fromkeys(names, (1, 10, 10 * version)))
    text = report_page(report([read(tmp_path, print).runs(None)[0]]), "many")
    assert len(text.encode()) < 1_000_000
    assert Page(text).table("replica", "inner steps")[63][:2] == ["r63", "400"]


def test_the_loss_of_a_task_of_the_users_own_has_no_unit(tmp_path: Path) -> None:
    run = record(tmp_path)
    run.files.recipe.write_text("name: tiny\ntask:\n  name: factory\n  factory: my.py:Fit\n", encoding="utf-8")
    assert reported(tmp_path) == 0
    text = page_of(tmp_path / "report.html").text
    assert "Held-out loss 5.5000 -> 2.2500." in text and "nats" not in text


def test_runs_are_compared_with_what_their_recipes_set_differently(tmp_path: Path) -> None:
    record(tmp_path / "a" / "run")
    other = record(tmp_path / "b" / "run", rounds=5)
    other.files.recipe.write_text(
        "name: tiny\nmethod:\n  name: diloco\n  sync_every: 20\nfaults:\n- do: kill\n  at_step: 9\n  for_s: null\n",
        encoding="utf-8",
    )
    assert reported(tmp_path / "a" / "run", tmp_path / "b" / "run", "--output", tmp_path / "both.html") == 0
    found = page_of(tmp_path / "both.html")
    assert found.tables[0][0] == ["", "a/run", "b/run"]
    assert ["outer steps", "3", "5"] in found.tables[0]
    settings = found.table("", "a/run", "b/run") + found.tables[1]
    assert ["method.sync_every", "10", "20"] in settings
    assert "[{do: kill, at_step: 9}]" in {value for row in settings for value in row}
    assert [run["name"] for run in found.data["runs"]] == ["a/run", "b/run"]
