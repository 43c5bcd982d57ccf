"""What ``ftopt launch`` says, and leaves behind, when a signal has ended it."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftopt.cli.main import main
from ftopt.errors import Unreachable
from ftopt.run.interruption import Interrupts, interruption, killer
from ftopt.run.processes import Child
from ftopt.run.scripts.others import Others
from ftopt.run.scripts.plan import Plan
from ftopt.run.scripts.saved import Saved, newest_saved
from ftopt.run.scripts.words import interrupted, leaving, others_there
from ftopt.watch.jsonl import read_lines
from ftopt.watch.report.write import write
from ftopt.watch.story import Story
from tests.run.running import until
from tests.run.test_launch import Start, ended, events, joined
from tests.run.test_launch import launch as launch

SLOW = """
    import sys, time, torch, ftopt
    model = torch.nn.Linear(2, 1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, ftopt.DiLoCo(sync_every=1000))
    with optimizer:
        for _ in optimizer.steps(2000):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(float(sys.argv[1]))
"""
SAVES = """
    import time, torch, ftopt
    model = torch.nn.Linear(2, 1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, ftopt.DiLoCo(sync_every=10))
    checkpoints = ftopt.Checkpoints("kept", optimizer, every=1)
    checkpoints.resume()
    with optimizer:
        for _ in optimizer.steps(100000):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.step()
            time.sleep(0.02)
"""


def told(path: Path) -> str:
    return " ".join(write([path], say=lambda text: None).story)


@pytest.mark.long
def test_a_second_ctrl_c_before_an_outer_step_has_an_account_and_a_report(launch: Start, tmp_path: Path) -> None:
    process = launch(SLOW, "-n", "2", "--folder", str(tmp_path / "runs" / "one"), words=("3.0",))
    until(lambda: sorted(joined(tmp_path)) == ["r0", "r1"])
    time.sleep(4.5)  # a step is in each
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    status, said = ended(process)
    assert status == 130, said
    assert said.splitlines()[-1] == "ftopt: interrupted before an outer step"
    assert "report: " in said and re.search(r"\d were lost\s+with\s+replicas that were killed", said), said
    assert "r0 was killed by the second Ctrl-C" in said and "r0 died" not in said
    folder = tmp_path / "runs" / "one"
    assert json.loads((folder / "summary.json").read_text())["dead_inner_steps_lost"] >= 2
    last = read_lines(folder / "events.jsonl")[-1]
    assert (last["event"], last["data"]["by"], last["data"]["again"]) == ("interrupted", "Ctrl-C", "Ctrl-C")
    (folder / "summary.json").unlink()  # as if the launcher had had no time for it
    text = told(folder)
    where = f"at inner step {last['inner_step']} of 2,000"
    assert f"It was interrupted by Ctrl-C {where}: r0 and r1 were killed by the second Ctrl-C." in text
    assert "still going on" not in text and "No other replica died." in text


@pytest.mark.long
def test_after_ctrl_c_the_checkpoint_that_has_the_model_is_named(launch: Start, tmp_path: Path) -> None:
    process = launch(SAVES, "-n", "2", "--folder", str(tmp_path / "runs" / "one"))
    until(lambda: sum(e["event"] == "decide" for e in events(tmp_path)) > 2)
    process.send_signal(signal.SIGTERM)
    status, said = ended(process)
    assert status == 143, said
    end = json.loads((tmp_path / "runs/one/summary.json").read_text())["inner_step"]
    at, newest = events(tmp_path)[-1]["inner_step"], max((tmp_path / "kept").iterdir())
    assert 20 <= at <= end, "the replicas contribute their pending steps"
    where = f"ended by SIGTERM at inner step {at}(?: of 100000)?"
    of = "" if at == end else f", of inner step {end}"
    assert re.fullmatch(
        f"ftopt: {where}. The model is in kept/{newest.name}{of}; the same command goes on from it",
        said.splitlines()[-1],
    ), said
    assert f"It was interrupted by SIGTERM at inner step {at} of 100,000: r0 and r1 left." in " ".join(said.split())


def came(story: Story, *signals: int) -> Interrupts:
    interrupts = Interrupts(story, {"r0", "r1"})
    for number in signals or (signal.SIGINT,):
        interrupts.come(number)
    return interrupts


def job(*replicas: dict[str, Any]) -> list[dict[str, Any]]:
    usual = {"incarnation": 1, "state": "training", "inner_step": 0, "counts": None, "versions": [None]}
    return [{"job": "default", "phase": "running", "replicas": [usual | each for each in replicas]}]


def test_the_last_line_says_where_the_model_is() -> None:
    plan, story = Plan("train.py"), Story(300, inner_step=133, members=2)
    at, came_now = "interrupted at inner step 133 of 300. ", came(story)
    others = interrupted(plan, came_now, story, ["vm-r0", "vm-r1"])
    assert others.startswith(f"{at}The model is not lost: vm-r0 and vm-r1 have it. Start the coordinator again")
    saved = Saved(Path("ck1/v00000007-1"), 133, resumes=True)
    assert interrupted(plan, came_now, story, saved=saved) == (
        f"{at}The model is in ck1/v00000007-1; the same command goes on from it"
    )
    assert interrupted(plan, came_now, story, saved=saved._replace(inner_step=120, resumes=False)) == (
        f"{at}The newest checkpoint is ck1/v00000007-1, of inner step 120; the same command goes on from it if "
        "train.py calls resume() before its loop"
    )
    assert "is lost unless train.py has saved it" in interrupted(plan, came_now, story)


def test_the_inner_step_of_the_signal_is_named_though_the_job_goes_on() -> None:
    plan, story = Plan("train.py"), Story(400, inner_step=50, members=2)
    story.row("r0").inner_step, story.row("vm-r0").inner_step = 57, 90
    first = came(story, signal.SIGINT, signal.SIGINT)
    assert (first.at, [*first]) == (57, [signal.SIGINT, signal.SIGINT])
    first.ask(lambda: job({"replica": "r0", "inner_step": 58}, {"replica": "vm-r0", "inner_step": 91}))
    first.ask(lambda: job({"replica": "r0", "inner_step": 70, "state": "away"}))
    story.inner_step = 300
    assert interrupted(plan, first, story, ["vm-r0"]).startswith(
        "interrupted at inner step 58 of 400. The model is not"
    )
    saved = Saved(Path("ck1/v00000007-1"), 300, resumes=True)
    assert "The model is in ck1/v00000007-1, of inner step 300; the same" in interrupted(
        plan, first, story, saved=saved
    )


def test_the_inner_step_of_the_signal_needs_no_coordinator() -> None:
    def look() -> list[dict[str, Any]]:
        raise Unreachable("no answer")

    story = Story(400, inner_step=50)
    story.row("r0").inner_step, story.row("r0").state = 80, "dead"
    first = came(story)
    first.ask(look)
    assert first.at == 50


def test_only_replicas_that_have_taken_a_step_train_on() -> None:
    others = Others({"r0"})
    away = {"replica": "vm-r3", "state": "away"}
    fetched, counted = {"replica": "vm-r1", "versions": [2]}, {"replica": "vm-r2", "counts": {"steps": 3}}
    everyone = job({"replica": "r0"}, {"replica": "vm-r0", "state": "fetching"}, fetched, counted, away)
    others.look(everyone, away=False)
    assert (others.here, others.untrained) == (["vm-r0", "vm-r1", "vm-r2"], ["vm-r0", "vm-r1"])
    assert others.holders == ["vm-r1", "vm-r2"]
    others.hear(
        {"event": "decide", "data": {"members": [["vm-r0", 1, 5, 5, 5.0, True], ["vm-r1", 1, 0, 0, 0.0, True]]}}
    )
    others.hear({"event": "counts", "data": {"counts": {"vm-r3": [1, {"steps": 4}]}}})
    others.look(everyone, away=True)
    assert (others.untrained, others.holders) == (["vm-r1"], ["vm-r0", "vm-r1", "vm-r2", "vm-r3"])


@pytest.mark.parametrize(
    ("here", "untrained", "said", "will"),
    [
        (["a"], [], "a of other machines still trains", "will"),
        (["a", "b"], [], "a and b of other machines still train", "will"),
        (["a"], ["a"], "a of other machines has not begun to train", "will"),
        (["a", "b"], ["b"], "a of other machines still trains, b has not begun to train", "they will"),
    ],
)
def test_what_others_do_is_said_when_their_coordinator_ends(
    here: list[str], untrained: list[str], said: str, will: str
) -> None:
    others = Others(())
    others.here, others.untrained = here, untrained
    assert others_there(others, "X").text == f"{said}, and {will} find no coordinator; to start it: X"
    assert others_there(others).text == f"{said}; this launch waits for the job's end (Ctrl-C ends it)"


@pytest.mark.parametrize("keeps", [False, True])
def test_checkpoints_are_said_to_keep_the_model_only_of_a_script_that_has_some(keeps: bool) -> None:
    told = leaving(Plan("train.py"), signal.SIGINT, [{}, {"checkpoints": "kept"} if keeps else {"steps": 3}]).text
    assert ("stays in what the script saves" in told) == keeps
    assert told.endswith("; another Ctrl-C ends them at once")


def test_the_help_says_where_the_report_of_a_joined_launch_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert "report, which with --join is in the first launch's folder" in " ".join(capsys.readouterr().out.split())


def test_a_folder_without_a_sound_checkpoint_has_none(tmp_path: Path) -> None:
    damaged = tmp_path / "v00000007-1796074157008758"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    assert newest_saved([{"checkpoints": str(tmp_path)}, {"steps": 3}, {}]) is None


def test_the_event_that_ends_a_run_says_only_what_is_known() -> None:
    event = interruption([signal.SIGINT, signal.SIGTERM], 20, ["r0"], planned=0, others=["vm-r0"])
    assert event.data == {"by": "Ctrl-C", "again": "SIGTERM", "asked": ["r0"], "others": ["vm-r0"]}
    line = {"event": event.event, "replica": event.replica, "incarnation": 0, "t_s": 1.0, "data": event.data}
    note = Story(0).take(line)
    assert note is not None and note.text == "the run was interrupted by Ctrl-C, and SIGTERM ended it at once"


@pytest.mark.parametrize(
    ("signals", "killed", "by"),
    [
        ([signal.SIGINT, signal.SIGINT], True, "the second Ctrl-C"),
        ([signal.SIGINT, signal.SIGTERM], True, "SIGTERM"),
        ([signal.SIGTERM], True, "its launcher, since it had not left 40 s after SIGTERM"),
        ([signal.SIGINT, signal.SIGINT], False, ""),
        ([], True, ""),
    ],
)
def test_a_replica_is_said_to_be_killed_by_its_launcher_only_if_it_was(
    tmp_path: Path, signals: list[int], killed: bool, by: str
) -> None:
    child = Child("r0", [sys.executable, "-c", "raise SystemExit(1)"], log=tmp_path / "log", life=1, env={})
    if killed:
        child.process.kill()
    child.process.wait()
    assert killer(signals, child, 40.0) == by
    child.end(0.0)
