"""What ``ftopt launch`` says, and leaves behind, when a signal has ended it."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from ftopt.run.interruption import interruption, killer
from ftopt.run.processes import Child
from ftopt.run.scripts.plan import Plan
from ftopt.run.scripts.saved import Saved, newest_saved
from ftopt.run.scripts.words import interrupted
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
    assert "It was interrupted by Ctrl-C at inner step 0 of 2,000: r0 and r1 were killed by the second Ctrl-C." in text
    assert "still going on" not in text and "No other replica died." in text


@pytest.mark.long
def test_after_ctrl_c_the_checkpoint_that_has_the_model_is_named(launch: Start, tmp_path: Path) -> None:
    process = launch(SAVES, "-n", "2", "--folder", str(tmp_path / "runs" / "one"))
    until(lambda: sum(e["event"] == "decide" for e in events(tmp_path)) > 2)
    process.send_signal(signal.SIGTERM)
    status, said = ended(process)
    assert status == 143, said
    at, newest = (
        json.loads((tmp_path / "runs/one/summary.json").read_text())["inner_step"],
        max((tmp_path / "kept").iterdir()),
    )
    where = f"ended by SIGTERM at inner step {at}(?: of 100000)?"
    assert re.fullmatch(
        f"ftopt: {where}. The model is in kept/{newest.name}; the same command goes on from it", said.splitlines()[-1]
    ), said
    assert f"It was interrupted by SIGTERM at inner step {at} of 100,000: r0 and r1 left." in " ".join(said.split())


def test_the_last_line_says_where_the_model_is() -> None:
    plan, story = Plan("train.py"), Story(300, inner_step=133, members=2)
    at = "interrupted at inner step 133 of 300. "
    others = interrupted(plan, signal.SIGINT, story, others=["vm-r0", "vm-r1"])
    assert others.startswith(f"{at}The model is not lost: vm-r0 and vm-r1 have it. Start the coordinator again")
    saved = Saved(Path("ck1/v00000007-1"), 133, resumes=True)
    assert interrupted(plan, signal.SIGINT, story, saved=saved) == (
        f"{at}The model is in ck1/v00000007-1; the same command goes on from it"
    )
    assert interrupted(plan, signal.SIGINT, story, saved=saved._replace(inner_step=120, resumes=False)) == (
        f"{at}The newest checkpoint is ck1/v00000007-1, of inner step 120; the same command goes on from it if "
        "train.py calls resume() before its loop"
    )
    assert "is lost unless train.py has saved it" in interrupted(plan, signal.SIGINT, story)


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
