"""The program of ``docs/quickstart.md`` does what the page promises, in processes of their own."""

from __future__ import annotations

import inspect
import os
from multiprocessing.connection import Connection

import torch

from ftopt.optimizer import joining
from ftopt.sync.server.coordinator import CoordinatorServer
from ftopt.watch.sentences import note_of
from tests.forkserver import Flag, die_with_parent
from tests.pages import PAGES, ROOT, programs
from tests.test_examples import LIMIT_S, heard, started

[TRAIN] = {block.text for page in PAGES for block in programs(page) if block.marks.get("file") == "train.py"}
"""The pages that show it show the same."""


def _coordinator(tells: Connection) -> None:
    die_with_parent()
    CoordinatorServer("127.0.0.1", 0, new=True, start_replicas=3).run(ready=tells.send)


def _train(tells: Connection, replica: str, url: str, back: Flag) -> None:
    """The program, with fewer steps, and without breaks: from step 400 on it waits until the killed
    replica is back. It tells what it prints."""
    die_with_parent()
    torch.set_num_threads(1)
    os.environ |= {"FTOPT_REPLICA": replica, "FTOPT_COORDINATOR": url}
    program = TRAIN
    for old, new in (
        ("2_000", "600"),
        ("time.sleep(0.03)", "pause(optimizer.inner_step)"),
    ):
        assert old in program
        program = program.replace(old, new)
    names = {
        "__name__": "__main__",
        "print": lambda text, **_: tells.send(text),
        "pause": lambda step: step < 400 or back.wait(LIMIT_S),
    }
    exec(compile(program, "train.py", "exec"), names)


def test_three_train_one_is_killed_and_comes_back_where_the_job_is() -> None:
    with started((_coordinator,)) as ((_, tells_url),):
        url = heard(tells_url)
        back = Flag()
        with started(*((_train, name, url, back) for name in ("r0", "r1", "r2"))) as ((_, r0), (killed, r1), (_, r2)):
            assert heard(r1).startswith("step ")
            killed.kill()
            back_again = Flag()
            back_again.set()
            with started((_train, "r1", url, back_again)) as ((_, again),):
                first = heard(again)
                back.set()
                ends = [first, *(heard(each) for each in (r0, r2))]
                for number, each in enumerate((again, r0, r2)):
                    while "held-out loss" not in ends[number]:
                        ends[number] = heard(each)
    assert first.startswith("step ") and not first.startswith("step 0,")
    assert len(set(ends)) == 1, f"they end with different models: {ends}"
    assert float(ends[0].removeprefix("held-out loss ")) < 0.01


def test_the_logs_on_the_page_have_the_sentences_of_the_program() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    of_replicas: list[tuple[str, str, int, int | None, dict[str, object]]] = [
        ("fault", "r1", 1, 150, {"do": "kill", "point": "reduce"}),
        ("lost", "r1", 1, None, {}),
        ("death", "r1", 1, None, {"status": "SIGKILL"}),
        ("spawn", "r1", 1, None, {"life": 2}),
        ("join", "r1", 2, 250, {}),
        ("join", "r2", 2, 950, {}),
    ]
    for event, replica, incarnation, step, data in of_replicas:
        at = {"replica": replica, "incarnation": incarnation, "version": 3, "inner_step": step}
        note = note_of({"event": event, **at, "data": data})
        assert note is not None and f" s  {note.text}\n" in page, note
    back = "replica %s is back as incarnation %d: it trains from the job's version %d, inner step %d on"
    assert back in inspect.getsource(joining), "the page quotes it"
    assert f"r2 | {back % ('r2', 2, 19, 950)}\n" in page
