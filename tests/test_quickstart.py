"""The program of ``docs/quickstart.md`` does what the page promises, in processes of their own."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import torch

from ftopt.sync.server.coordinator import CoordinatorServer
from tests.forkserver import Flag, die_with_parent
from tests.pages import PAGES, programs
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
