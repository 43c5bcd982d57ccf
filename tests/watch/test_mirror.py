"""Mirrors: nothing that the other process does stalls, stops or outlives the trainer."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ftopt
from ftopt._connect import _Log
from ftopt.errors import UserError
from ftopt.events import Event, Subscribers, wants_gradients, wants_steps
from ftopt.watch.trackers import mirror as mirrors
from ftopt.watch.trackers.mirror import Mirror
from ftopt.watch.trackers.mirror_process import Growth
from tests.optimizer.running import together
from tests.sync.server.access import coordinator_thread
from tests.watch.sinks import Dies, Hangs, RaisesAtOnce, RaisesLater, Written, mirror, read

WAIT_S = 100.0


def step(number: int, **data: object) -> Event:
    return Event("stepped", "r0", 1, inner_step=number, data={"lr": 0.1, "loss": float(number), **data})


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.01)


def attended(made: Mirror) -> Mirror:
    made.attend("job", "r0")
    return made


@pytest.mark.long
def test_what_it_is_told_arrives_in_order_and_the_process_is_gone_afterwards(tmp_path: Path) -> None:
    made = attended(mirror(Written, tmp_path / "to"))
    for number in range(1, 4):
        made(step(number))
    made.log({"mine": 5})
    made(Event("stepped", "another", 1, inner_step=9))
    made.close(timeout_s=WAIT_S)
    first, *points, last = read(tmp_path / "to")
    assert first["options"] == {"to": str(tmp_path / "to"), "job": "job", "replica": "r0", "life": 1}
    assert [(p["at"], p["values"].get("inner/loss"), p["values"].get("mine")) for p in points] == [
        (1, 1.0, None), (2, 2.0, None), (3, 3.0, None), (3, None, 5.0),
    ]  # fmt: skip
    assert last == {"killed": False}
    assert not Path(f"/proc/{first['pid']}").exists()
    made(step(4))
    made.close()


@pytest.mark.parametrize(
    ("sink", "said", "here"),
    [
        (RaisesAtOnce, "no key", False), (RaisesLater, "no space left", False), (Dies, "signal 9", False),
        (RaisesAtOnce, "no key", True), (RaisesLater, "no space left", True),
    ],
)  # fmt: skip
def test_a_failure_is_one_line_of_the_log(
    sink: type, said: str, here: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = attended(mirror(sink, tmp_path / "to", here=here))
    made(step(1))
    wait_for(lambda: made._runs["r0"]._over)
    for number in range(2, 100):
        made(step(number))
    made.close(timeout_s=WAIT_S)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    text = record.getMessage()
    assert said in text and "replica r0" in text and "nothing is copied" in text


@pytest.mark.parametrize("here", [False, True], ids=["process", "thread"])
def test_one_that_hangs_holds_up_nobody_and_is_ended(
    here: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "QUEUED", 50)
    made = attended(mirror(Hangs, tmp_path / "to", here=here))
    made(step(1))
    wait_for(lambda: len(read(tmp_path / "to")) == 2)
    pid = read(tmp_path / "to")[0]["pid"]
    began = time.monotonic()
    for number in range(2, 5000):
        made(step(number))
    assert time.monotonic() - began < 60.0, "5000 events: it hangs for 10 min"
    assert made._runs["r0"]._lines.qsize() <= 50
    began = time.monotonic()
    made.close(timeout_s=0.5)
    assert time.monotonic() - began < 60.0
    assert here or not Path(f"/proc/{pid}").exists()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "50 points wait" in told[0] and "within 0.5 s" in told[1]


def test_a_life_that_never_joins_starts_no_process(tmp_path: Path) -> None:
    made = attended(mirror(Written, tmp_path / "to"))
    made(Event("hold", "r0", 0, data={"text": "waiting"}))
    made.close()
    assert made._runs["r0"]._process is None


TRAINER = """
import sys, time
from pathlib import Path
from ftopt.events import Event
from tests.watch.sinks import Written, mirror
made = mirror(Written, Path(sys.argv[1]))
made.attend("job", "r0")
made(Event("stepped", "r0", 1, inner_step=1, data={"lr": 0.1}))
print("told", flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_what_a_killed_trainer_has_told_is_written(tmp_path: Path) -> None:
    to = tmp_path / "to"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(to)], stdout=subprocess.PIPE, env=env) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"told\n"
        wait_for(lambda: len(read(to)) > 1)  # the event is on its way only when the process is there
        trainer.send_signal(signal.SIGKILL)
    wait_for(lambda: read(to)[-1] == {"killed": True})
    assert [line["at"] for line in read(to) if "at" in line] == [1]
    wait_for(lambda: not Path(f"/proc/{read(to)[0]['pid']}").exists())


def test_a_file_that_does_not_grow_is_complained_of_once(tmp_path: Path) -> None:
    now, file = [0.0], tmp_path / "file"
    file.write_bytes(b"x")
    growth = Growth(file, clock=lambda: now[0])
    for _ in range(3):
        now[0] += 6.0
        file.write_bytes(file.read_bytes() + b"x")
        assert growth.written() is None
    for _ in range(2):
        now[0] += 6.0
        assert growth.written() is None, "what was written just now may still come"
    now[0] += 6.0
    assert "does not grow" in str(growth.written())
    assert growth.written() is None and growth.check() is None


def test_a_file_to_which_nothing_was_written_need_not_grow(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert Growth(tmp_path / "file").check() is None


def test_wrong_arguments_are_refused_where_they_are_given(tmp_path: Path) -> None:
    made = mirror(Written, tmp_path / "to")
    with pytest.raises(UserError, match="none yet"):
        made.log({"mine": 1.0})
    made.attend("job", "r0")
    with pytest.raises(UserError, match=r"\.item\(\)"):
        made.log({"mine": "much"})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="must be one of its replicas: r0"):
        made.log({"mine": 1.0}, replica="r7")
    with pytest.raises(UserError, match="every=0"):
        mirror(Written, tmp_path / "to", every=0)
    with pytest.raises(UserError, match="a list of such"):
        ftopt.solo(on_event=["a"])  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"give an object: Mirror\(\.\.\.\)"):
        ftopt.solo(on_event=Mirror)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="copies r0 of the job 'job'; make another one"):
        made.attend("another", "r0")
    made.close()
    with pytest.raises(UserError, match="was closed"):
        ftopt.solo(on_event=[made])
    with pytest.raises(UserError, match=r"log\(\) after close"):
        made.log({"mine": 1.0})


def test_of_several_subscribers_one_that_raises_keeps_no_other_from_hearing(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    class Rarely:
        every_step = False

        def __call__(self, event: Event) -> None:
            heard.append(event.event)

    def broken(event: Event) -> None:
        raise RuntimeError("broken")

    both = Subscribers([broken, Rarely()])
    both(Event("commit", "r0"))
    both(Event("inner", "r0"))
    assert heard == ["commit"]
    assert "on_event raised" in caplog.text
    assert wants_steps(both) and not wants_steps(Subscribers([Rarely()]))
    assert not wants_gradients(both) and wants_gradients(Subscribers([Rarely(), Mirror({}, every=1)]))


def test_what_only_copies_events_leaves_the_log_to_tell_the_user(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Log, "_all", weakref.WeakSet())  # other tests may have left theirs

    class Copies:
        only_copies = True

        def __call__(self, event: Event) -> None:
            pass

    def train(replica: str, on_event: Any) -> None:
        model = torch.nn.Linear(1, 1)
        group = ftopt.connect(url, replica, on_event=on_event, policy=ftopt.FaultPolicy(start_replicas=3))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=1), group=group):
            pass

    assert ftopt.TensorBoard.only_copies and ftopt.Wandb.only_copies
    with coordinator_thread(token=None) as url:
        own = [lambda event: None, Copies()]
        each = {"r0": Copies(), "r1": [Copies(), Copies()], "r2": own}
        together([partial(train, replica, on_event) for replica, on_event in each.items()])
    told = {record.getMessage() for record in caplog.records}
    assert {name for name in each if f"{name}: all 3 replicas are connected" in told} == {"r0", "r1"}
