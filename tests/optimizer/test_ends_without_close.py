"""Scripts that end without ``close()``: what they have trained is handed in, and they are told."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Ends = Callable[[str], tuple[list[str], str, int]]
"""What a script prints, to both streams, and its exit status."""

HEAD = """
import os, sys, threading, torch, ftopt
def tell(event):
    if event.event in ("decide", "leave"):
        print(event.event, sum(m[2] for m in event.data.get("members", [])), flush=True)
def train(group, steps=3, **settings):
    model = torch.nn.Linear(4, 2)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=100), group=group, **settings)
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return optimizer
"""


FORKS = """
import os, sys, torch, torch._dynamo, ftopt
from ftopt.errors import UserError
from ftopt import LocalSGD, wrap
from ftopt.sync import local
for line in sys.stdin:
    folder = line.rstrip("\\n")
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
for number, path in enumerate(("/dev/null", folder + "/out", folder + "/err")):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
with open(folder + "/script") as file:
    script = file.read()
exec(script)
"""
"""Has imported what takes seconds; a fork of it then ends as any process of Python does."""


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def ends(forks: subprocess.Popen[str], tmp_path: Path) -> Ends:
    def run(script: str) -> tuple[list[str], str, int]:
        (tmp_path / "script").write_text(HEAD + textwrap.dedent(script))
        assert forks.stdin is not None and forks.stdout is not None
        forks.stdin.write(f"{tmp_path}\n")
        forks.stdin.flush()
        ended, _, _ = select.select([forks.stdout], [], [], 110)
        assert ended, "the script did not end"
        status = int(forks.stdout.readline())
        return (tmp_path / "out").read_text().split("\n")[:-1], (tmp_path / "err").read_text(), status

    return run


HANDED_IN = ["decide 3", "leave 0"]


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [
        "o = train(ftopt.solo(on_event=tell))",
        "def main():\n    train(ftopt.solo(on_event=tell))\nmain()",
        "train(ftopt.solo(on_event=tell))\nsys.exit(0)",
        "g, there = ftopt.solo(on_event=tell), threading.Event()\n"
        "def run():\n    o = train(g, 2)\n    there.set()\n    o.step()\n"
        "threading.Thread(target=run).start()\nthere.wait()",
        "o = train(ftopt.solo(on_event=tell))\n"
        "if os.fork() == 0:\n    threading._shutdown()\n    os._exit(0)\nos.wait()",
    ],
    ids=["at the end", "out of scope", "sys.exit", "in a thread", "with a forked child"],
)
def test_the_steps_of_a_script_that_ends_without_close_are_handed_in_and_it_is_told(ends: Ends, script: str) -> None:
    events, told, status = ends(script)
    assert events == HANDED_IN, told
    assert told.count("without close(): they are handed in now") == 1
    assert status == 0


def test_a_signal_ends_a_script_without_advice_on_close(ends: Ends) -> None:
    script = """
    import signal
    o = train(ftopt.solo(on_event=tell), leave_on_signals=True)
    os.kill(os.getpid(), signal.SIGTERM)
    o.step()
    """
    events, told, status = ends(script)
    assert events == ["decide 4", "leave 0"] and status == 0, told
    assert "close()" not in told
    assert "none of its 4 inner steps is pending; ftopt has saved nothing: " in told


def test_two_replicas_of_one_script_do_not_wait_for_each_other(ends: Ends) -> None:
    script = """
    a, b = ftopt.local_groups(2, on_event=tell)
    threads = [threading.Thread(target=train, args=(group,)) for group in (a, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    """
    events, told, _ = ends(script)
    assert sum(int(x.split()[1]) for x in events) == 6, told
    assert "has left with" not in told


@pytest.mark.long
@pytest.mark.parametrize(
    ("ending", "why"),
    [("raise KeyError('of the user')", "it left at once"), ("raise KeyboardInterrupt", "Ctrl-C ended its loop")],
)
def test_after_an_exception_it_leaves_at_once_and_says_what_is_lost(ends: Ends, ending: str, why: str) -> None:
    events, told, status = ends(f"o = train(ftopt.solo(on_event=tell))\n{ending}")
    assert events == ["leave 0"]
    assert f"r0 has left with 3 inner steps that no committed state contains: {why}" in told
    assert "of its 3 inner steps 3 are in no version; ftopt has saved nothing: " in told
    assert status != 0


@pytest.mark.long
def test_a_forked_child_neither_trains_nor_leaves_and_ends_at_once(ends: Ends) -> None:
    script = """
    with train(ftopt.solo(on_event=tell)) as o:
        if os.fork() == 0:
            try:
                o.step()
            except UserError as error:
                print(error)
            o.close()
            sys.exit(0)
        print(os.wait()[1])
    """
    events, told, status = ends(script)
    assert events[0].startswith("step(): this process was forked from the one that has joined the job"), told
    assert (events[1:], told, status) == (["0", *HANDED_IN], "", 0)


def test_who_has_closed_is_told_nothing(ends: Ends) -> None:
    events, told, status = ends("o = train(ftopt.solo(on_event=tell))\no.close()")
    assert (events, told, status) == (HANDED_IN, "", 0)


def test_a_daemon_thread_that_still_trains_is_not_waited_for(ends: Ends) -> None:
    script = """
    there = threading.Event()
    def run():
        o = train(ftopt.solo(on_event=tell))
        there.set()
        threading.Event().wait()
    threading.Thread(target=run, daemon=True).start()
    there.wait()
    """
    events, told, status = ends(script)
    assert events == ["leave 0"], told
    assert "r0 has left with 3 inner steps" in told
    assert status == 0


@pytest.mark.parametrize(
    ("end", "early", "status"),
    [
        ("optimizer = train(group)\nraise ZeroDivisionError", True, 1),
        ("in_thread(ZeroDivisionError())", True, 0),
        pytest.param("in_thread(SystemExit(3))", True, 0, marks=pytest.mark.long),
        ("in_thread(SystemExit(0))", False, 0),
    ],
)
def test_one_that_fails_leaves_early_so_that_a_spare_takes_its_place(
    end: str, early: bool, status: int, ends: Ends
) -> None:
    script = """
    group = ftopt.solo()
    leave = group.leave
    group.leave = lambda **how: (print("early", how["early"], flush=True), leave(**how))
    def in_thread(error):
        def run():
            optimizer = train(group)
            raise error
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    """
    events, told, ended = ends(textwrap.dedent(script) + end)
    assert (events, ended) == ([f"early {early}"], status), told
