"""A script that is told to end by a signal hands its steps in, without a line of its own for that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.events import Event
from tests.optimizer.running import together

USUAL = [signal.SIG_DFL, signal.default_int_handler]
"""Of SIGTERM and SIGINT."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Each test leaves the process' handlers as they were: Python's, also where the shell has the tests' process, as
    all in its background, ignore Ctrl-C."""
    usual = dict(zip((signal.SIGTERM, signal.SIGINT), USUAL, strict=True))
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == usual


def wrapped(group: ftopt.ReplicaGroup, *, leave: bool = True) -> ftopt.ReplicaOptimizer:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=100), group=group, leave_on_signals=leave)


def step(optimizer: ftopt.ReplicaOptimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_step_that_a_signal_comes_in_is_the_last_one_and_all_are_handed_in(number: int) -> None:
    optimizer, steps = wrapped(ftopt.solo()), 0
    with pytest.raises(SystemExit) as ended, optimizer:
        for steps in range(1, 10):
            if steps == 3:
                tell(number)
            step(optimizer)
    assert (ended.value.code, steps, optimizer.local_steps, optimizer.pending_steps) == (0, 3, 3, 0)
    assert optimizer.status.committed_step == 3


def test_without_with_the_steps_are_handed_in_by_close() -> None:
    optimizer = wrapped(ftopt.solo())
    step(optimizer)
    tell(signal.SIGTERM)
    for _ in range(2):  # who goes on is told again
        with pytest.raises(SystemExit):
            step(optimizer)
    optimizer.close()
    assert (optimizer.local_steps, optimizer.pending_steps) == (3, 0)


def test_a_signal_that_comes_while_the_last_steps_are_handed_in_finds_a_replica_at_its_end() -> None:
    group, early = ftopt.solo(), []
    leave = group.leave
    group.leave = lambda **how: (early.append(how["early"]), leave(**how))[1]  # type: ignore[method-assign]
    with wrapped(group) as optimizer:
        optimizer._core.saving.before_leaving = lambda timeout_s: tell(signal.SIGTERM)
        step(optimizer)
    assert early == [False]


def test_sigterm_again_is_the_same_one() -> None:
    optimizer = wrapped(ftopt.solo())
    with pytest.raises(SystemExit), optimizer:
        tell(signal.SIGTERM)
        tell(signal.SIGTERM)
        step(optimizer)
    assert optimizer.pending_steps == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_ctrl_c_is_what_it_always_was(first: int) -> None:
    optimizer = wrapped(ftopt.solo())
    with pytest.raises(KeyboardInterrupt), optimizer:
        step(optimizer)
        tell(first)
        tell(signal.SIGINT)
        step(optimizer)
    assert optimizer.pending_steps == 1


def around(number: int, came: list[int]) -> None:
    """User code's own handler, which calls the one that it finds, as documented for `signal.signal`."""
    before = signal.getsignal(number)
    assert callable(before)

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)
        before(number, frame)

    signal.signal(number, handler)


def test_a_handler_around_it_changes_nothing() -> None:
    came: list[int] = []
    try:
        for _ in range(2):  # the second job finds the first one's handler, through the user's own
            with pytest.raises(KeyboardInterrupt), wrapped(ftopt.solo()) as optimizer:
                around(signal.SIGINT, came)
                tell(signal.SIGINT)
                assert came.pop() == signal.SIGINT
                tell(signal.SIGINT)
                step(optimizer)
            assert came.pop() == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):  # nobody listens any more
                tell(signal.SIGINT)
            came.clear()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_who_waits_for_the_first_replicas_has_nothing_to_leave() -> None:
    asked = threading.Event()

    def on_event(event: Event) -> None:
        if event.event == "hold" and not asked.is_set():  # 1 of 2 replicas connected
            asked.set()
            tell(signal.SIGTERM)

    optimizer = wrapped(ftopt.local_groups(2, on_event=on_event)[0])
    with pytest.raises(SystemExit) as ended, optimizer:
        pass
    assert ended.value.code == 0


def test_signals_are_left_alone_unless_asked_for_and_where_they_are_ignored() -> None:
    mine: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: mine.append(number))
    before, interrupt = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with wrapped(ftopt.solo(), leave=False) as optimizer:
            tell(signal.SIGTERM)
            step(optimizer)
        assert mine == [signal.SIGTERM]
        with wrapped(ftopt.solo()) as optimizer:
            tell(signal.SIGINT)  # as of a script in the background
            step(optimizer)
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before
        with wrapped(ftopt.solo()):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # user code's own, which stays
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupt)


def test_two_jobs_of_one_process_are_both_left_with_all_steps() -> None:
    first, second = wrapped(ftopt.solo()), wrapped(ftopt.solo())
    with pytest.raises(SystemExit), first, second:
        step(first)
        step(second)
        tell(signal.SIGTERM)
        step(first)
    assert (first.pending_steps, second.pending_steps, second.local_steps) == (0, 0, 1)
    with wrapped(ftopt.solo()) as third:  # the signal was for those
        step(third)


FORKS = """
import os, signal, threading, time
import ftopt
from tests.optimizer.test_leaving_on_signals import USUAL, around, step, tell, wrapped

def forked(child):
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writes, b"x")  # by now: Python forgets in a child what signals were pending
        os._exit(child())
    assert os.read(reads, 1) == b"x"
    pids.append(pid)

def status():
    return os.waitstatus_to_exitcode(os.waitpid(pids.pop(), 0)[1])

def sleeps():
    while True:  # not pause(): a signal between a line and the call itself would be waited for in vain
        time.sleep(0.01)

def has_other_handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != USUAL

pids = []
with wrapped(ftopt.solo()) as optimizer:
    step(optimizer)
    forked(sleeps)
    os.kill(pids[0], signal.SIGTERM)
    assert status() == -signal.SIGTERM
    forked(has_other_handlers)
    assert status() == 0
    thread = threading.Thread(target=forked, args=(has_other_handlers,))
    thread.start()
    thread.join()
    assert status() == 0
    assert has_other_handlers()  # here a signal is still noted
    step(optimizer)
    around(signal.SIGTERM, [])
    tell(signal.SIGINT)
    tell(signal.SIGTERM)  # which is how torchrun passes a second Ctrl-C on
    os._exit(99)
"""


@pytest.mark.long
def test_a_child_ends_as_ever_and_has_the_handlers_that_were_before_and_sigterm_after_ctrl_c_ends_the_process() -> None:
    """In a process of its own: this one's threads may hold any lock, and a child has it for ever."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=200.0)[1]
            assert process.returncode == -signal.SIGTERM, said
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_another_thread_than_the_main_one_is_refused() -> None:
    def run() -> None:
        with pytest.raises(UserError, match="leave_on_signals=True on a thread that is not the main one"):
            wrapped(ftopt.solo()).__enter__()

    together([run])


def test_a_loop_that_waits_for_samples_is_ended_too() -> None:
    groups = ftopt.local_groups(
        2, policy=ftopt.FaultPolicy(start_replicas=2, grace_s=0.1, dead_after_s=60.0, evict_after_s=60.0)
    )
    loaders = [ftopt.DataLoader(list(torch.arange(640.0)), batch_size=1, group=group) for group in groups]
    drawn, ended = threading.Event(), threading.Event()

    def other() -> None:
        with wrapped(groups[1], leave=False) as optimizer:
            next(iter(loaders[1]))  # which this replica keeps
            drawn.set()
            assert ended.wait(100.0)
            step(optimizer)

    def asks() -> None:
        while groups[0].session.heartbeats.state != "out_of_units":  # type: ignore[attr-defined]
            ended.wait(0.01)
        tell(signal.SIGTERM)

    threads = [threading.Thread(target=each, daemon=True) for each in (other, asks)]
    optimizer, steps = wrapped(groups[0]), 0
    threads[0].start()
    with pytest.raises(SystemExit), optimizer:
        assert drawn.wait(60.0)
        threads[1].start()
        for _ in loaders[0]:
            step(optimizer)
            steps += 1
        pytest.fail("the data ended")
    ended.set()
    for thread in threads:
        thread.join(60.0)
    assert steps > 0
    assert (optimizer.local_steps, optimizer.pending_steps) == (steps, 0)


@pytest.mark.parametrize("wrong", [None, "yes", 15])
def test_it_is_true_or_false(wrong: object) -> None:
    with pytest.raises(UserError, match="leave_on_signals"):
        wrapped(ftopt.solo(), leave=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("early", [True, False])
def test_who_leaves_early_opens_a_round_for_its_steps(early: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The others' next round is 95 steps away."""
    policy = ftopt.FaultPolicy(start_replicas=2, grace_s=0.2, dead_after_s=60.0)
    groups, left, trains = ftopt.local_groups(2, policy=policy), threading.Event(), threading.Event()

    def leaves() -> tuple[int, int]:
        optimizer = wrapped(groups[0], leave=False)
        for _ in range(5):
            step(optimizer)
        assert trains.wait(timeout=60)
        optimizer.close(timeout_s=30.0 if early else 1.0, early=early)
        left.set()
        return optimizer.pending_steps, optimizer.version

    def stays() -> tuple[int, int]:
        with wrapped(groups[1], leave=False) as optimizer:
            for number in range(95):
                step(optimizer)
                trains.set()
                if left.wait(timeout=0.3 if number < 80 else 60.0):
                    break
            assert optimizer.local_steps < 95
        return optimizer.pending_steps, optimizer.version

    (pending, version), (rest, _) = together([leaves, stays])
    assert (pending, version, rest) == ((0, 1, 0) if early else (5, 0, 0))
    assert ("has left with 5 inner steps" in caplog.text) is not early


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise FileNotFoundError("its own")


def test_an_error_of_the_data_set_is_no_end_of_a_worker() -> None:
    optimizer = wrapped(ftopt.solo())
    with pytest.raises(FileNotFoundError, match="its own"), optimizer:
        step(optimizer)
        tell(signal.SIGTERM)
        for _ in torch.utils.data.DataLoader(Broken()):
            """Never."""
