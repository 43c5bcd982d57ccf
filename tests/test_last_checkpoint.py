"""A replica that leaves its job in good order saves the version that it leaves; what is logged then."""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ftopt
from ftopt.checkpoint.reader import find, whole
from ftopt.errors import UserError
from ftopt.integrations import finish
from ftopt.sync.replica.log.rounds import RoundsLog
from tests.checkpoint.parts import FullDisk
from tests.optimizer.running import PATIENT, together
from tests.problems import seeded

TOGETHER = replace(PATIENT, start_replicas=2)


def wrapped(group: ftopt.ReplicaGroup, *, leave: bool = False) -> tuple[ftopt.ReplicaOptimizer, nn.Module]:
    with seeded():
        model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=10), group=group, leave_on_signals=leave), model


def step(optimizer: ftopt.ReplicaOptimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


class Closed:
    """What a loop has included, and has put away before its optimizer."""

    def __init__(self) -> None:
        self.open = True

    def state_dict(self) -> dict[str, object]:
        if not self.open:
            raise ValueError("the loader is closed")
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


@pytest.mark.parametrize("planned", [15, 20])
def test_finish_saves_the_version_that_it_leaves(tmp_path: Path, planned: int) -> None:
    """Whether steps are pending when the loop has ended, or not."""
    optimizer, _ = wrapped(ftopt.solo())
    checkpoints = ftopt.Checkpoints(tmp_path, optimizer, every=1_000)
    with optimizer:
        while optimizer.inner_step < planned:
            step(optimizer)
            checkpoints.step()
        finish(optimizer, planned)
    (checkpoint,) = whole(tmp_path)
    assert find(checkpoint).manifest.inner_step == planned == optimizer.status.committed_step


def test_all_that_leave_together_make_one_complete_checkpoint_of_the_last_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else who takes half a second from saying that it leaves to handing in is left to a round of its own.
    monkeypatch.setattr("ftopt.sync.protocol.coordinator.rounds.waiting.PATIENCE_S", 60.0)
    groups, trained = ftopt.local_groups(2, policy=TOGETHER), threading.Barrier(2)

    def replica(group: ftopt.ReplicaGroup) -> int:
        optimizer, _ = wrapped(group)
        checkpoints = ftopt.Checkpoints(tmp_path / "c", optimizer, every=1_000)
        with optimizer:
            for _ in range(25):
                step(optimizer)
                checkpoints.step()
            trained.wait(timeout=30)  # who leaves waits for nobody
            checkpoints.close()  # as the examples do: the steps behind it are saved all the same
        assert optimizer.pending_steps == 0
        return optimizer.version

    versions = together([lambda group=group: replica(group) for group in groups])  # type: ignore[misc]
    (checkpoint,) = whole(tmp_path / "c")
    assert find(checkpoint).manifest.version == max(versions) >= 3
    assert find(checkpoint).manifest.inner_step == 25


def test_each_of_several_machines_saves_a_checkpoint_of_its_own_that_another_job_resumes_from(tmp_path: Path) -> None:
    groups, trained = ftopt.local_groups(2, policy=TOGETHER), threading.Barrier(2)

    def replica(group: ftopt.ReplicaGroup) -> torch.Tensor:
        optimizer, model = wrapped(group)
        ftopt.Checkpoints(tmp_path / group.replica, optimizer, every=1_000, shared=False)
        with optimizer:
            for _ in range(20):
                step(optimizer)
            trained.wait(timeout=30)
        with torch.no_grad():
            return model.weight.detach().clone()

    one, other = together([lambda group=group: replica(group) for group in groups])  # type: ignore[misc]
    assert torch.equal(one, other)
    for name in ("r0", "r1"):
        (checkpoint,) = whole(tmp_path / name)
        assert list(find(checkpoint).replicas) == [name]

    groups, both_joined = ftopt.local_groups(2, policy=TOGETHER), threading.Barrier(2)

    def resumes(group: ftopt.ReplicaGroup) -> tuple[int, torch.Tensor]:
        optimizer, model = wrapped(group)
        with torch.no_grad():
            model.weight.zero_()
        assert ftopt.Checkpoints(tmp_path / "new", optimizer, every=None).resume(tmp_path / "r1")
        with optimizer:
            both_joined.wait(timeout=30)
            return optimizer.start_step, model.weight.detach().clone()

    for start_step, weight in together([lambda group=group: resumes(group) for group in groups]):  # type: ignore[misc]
        assert start_step == 20
        assert torch.equal(weight, one)


def test_what_a_method_forgets_at_an_outer_step_is_not_in_the_checkpoint_of_the_last_one(tmp_path: Path) -> None:
    with seeded():
        model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    method = ftopt.SlowMo(sync_every=10, inner_state="reset")
    optimizer = ftopt.wrap(inner, model, method, group=ftopt.solo())
    ftopt.Checkpoints(tmp_path / "c", optimizer, every=1_000)
    with optimizer:
        for _ in range(15):
            step(optimizer)  # the last outer step is made as it leaves
    (checkpoint,) = whole(tmp_path / "c")
    assert find(checkpoint).manifest.inner_step == 15
    assert "momentum_buffer" not in str(find(checkpoint).own("r0"))


def test_a_replica_that_leaves_after_an_exception_saves_nothing(tmp_path: Path) -> None:
    optimizer, _ = wrapped(ftopt.solo())
    ftopt.Checkpoints(tmp_path / "c", optimizer, every=1_000)
    with pytest.raises(ZeroDivisionError), optimizer:
        for _ in range(10):
            step(optimizer)
        raise ZeroDivisionError
    assert not whole(tmp_path / "c")


def test_what_fails_in_the_last_checkpoint_is_logged_and_the_replica_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, _ = wrapped(ftopt.solo())
    checkpoints, closed = ftopt.Checkpoints(tmp_path / "c", optimizer, every=1_000), Closed()
    with optimizer:
        checkpoints.include(loader=closed)
        step(optimizer)
        closed.open = False
    assert optimizer.pending_steps == 0
    assert not checkpoints.close()
    (record,) = caplog.records
    assert record.getMessage() == "replica r0: the version that it leaves is not saved"
    assert record.exc_info is not None and "the loader is closed" in str(record.exc_info[1])


@pytest.mark.parametrize("room", [0, 20_000])
def test_a_disk_that_is_full_at_the_end_is_told_at_the_end(
    room: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint before that, and without one."""
    monkeypatch.setattr("ftopt.checkpoint.writer.Disk", lambda: FullDisk(room))
    optimizer, _ = wrapped(ftopt.solo())
    checkpoints = ftopt.Checkpoints(tmp_path, optimizer, every=1, keep=1)
    with optimizer:
        for _ in range(75):
            step(optimizer)
            checkpoints.step()
            checkpoints._writer.wait(30)
    assert not checkpoints.close()
    there = whole(tmp_path)
    assert bool(there) == bool(room)
    newest = (
        f"the newest complete checkpoint is {there[0]}" if room else f"there is no complete checkpoint in {tmp_path}"
    )
    assert all(message.endswith(newest) for message in caplog.messages)
    assert all("is not saved: " not in message for message in caplog.messages[:-1])
    assert caplog.messages[-1].startswith("replica r0: its last checkpoint, v00000008-")
    assert "is not saved: [Errno 28] No space left on device" in caplog.messages[-1]


def test_close_tells_whether_the_last_checkpoint_is_on_disk(tmp_path: Path) -> None:
    optimizer, _ = wrapped(ftopt.solo())
    checkpoints = ftopt.Checkpoints(tmp_path, optimizer, every=1_000)
    with optimizer:
        step(optimizer)
    assert checkpoints.close()


@pytest.mark.parametrize("wrong", [None, 1, "no"])
def test_shared_is_true_or_false(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(UserError, match="shared="):
        ftopt.Checkpoints(tmp_path / "c", wrapped(ftopt.solo())[0], shared=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("child", [False, True])
def test_a_script_that_a_signal_ends_says_where_it_stands_and_how_to_go_on(
    child: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of `multiprocessing` has no command that would start it again."""
    if child:
        monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--name", "a b"])
    monkeypatch.setenv("FTOPT_REPLICA", "r0")
    monkeypatch.setenv("FTOPT_JOB", "second")
    monkeypatch.setenv("FTOPT_TOKEN", "a" * 64)  # a secret: it must not be in the log
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        optimizer, _ = wrapped(ftopt.solo(), leave=True)
        ftopt.Checkpoints(tmp_path / "c", optimizer, every=1_000)
        with pytest.raises(SystemExit), optimizer:
            step(optimizer)
            os.kill(os.getpid(), signal.SIGTERM)
            step(optimizer)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caplog.messages == [
        "replica r0 leaves its job: SIGTERM",
        "replica r0 has left at version 1, inner step 2: none of its 2 inner steps is pending"
        + ("" if child else "; to go on: FTOPT_JOB=second FTOPT_REPLICA=r0 python train.py --name 'a b'"),
    ]
    (checkpoint,) = whole(tmp_path / "c")
    assert find(checkpoint).manifest.inner_step == 2


def test_a_signal_says_at_once_that_nothing_saves_the_model(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        optimizer, _ = wrapped(ftopt.solo(), leave=True)
        with pytest.raises(SystemExit), optimizer:
            os.kill(os.getpid(), signal.SIGTERM)
            step(optimizer)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caplog.messages[0].startswith("replica r0 leaves its job: SIGTERM; it has no ftopt.Checkpoints: only ")


def test_ctrl_c_without_leave_on_signals_says_what_would_have_kept_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, _ = wrapped(ftopt.solo())
    with pytest.raises(KeyboardInterrupt), optimizer:
        step(optimizer)
        raise KeyboardInterrupt
    said, way_on = caplog.messages
    assert said == (
        "replica r0 has left with 1 inner step that no committed state contains: Ctrl-C ended its loop; "
        "ftopt.wrap(..., leave_on_signals=True) hands them in"
    )
    nothing = "ftopt has saved nothing: make checkpoints = ftopt.Checkpoints(FOLDER, optimizer)"
    assert f"left at version 0, inner step 0: of its 1 inner step 1 is in no version; {nothing}" in way_on


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_says_how_to_go_on_only_where_a_checkpoint_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: bool
) -> None:
    optimizer, _ = wrapped(ftopt.solo())
    checkpoints = ftopt.Checkpoints(tmp_path / "c", optimizer)
    with pytest.raises(KeyboardInterrupt), optimizer:
        while saved and not whole(tmp_path / "c"):
            step(optimizer)
            checkpoints.step()
        step(optimizer)
        raise KeyboardInterrupt
    assert ("; to go on: " in caplog.messages[-1]) == saved
    assert (f"; ftopt has saved nothing yet in {tmp_path / 'c'}" in caplog.messages[-1]) != saved


def test_a_replica_that_others_train_on_without_says_how_to_go_on(caplog: pytest.LogCaptureFixture) -> None:
    one, other = ftopt.local_groups(2, policy=TOGETHER)

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt), wrapped(one)[0] as optimizer:
            for _ in range(20):
                step(optimizer)
            raise KeyboardInterrupt

    def survivor() -> None:
        with wrapped(other)[0] as optimizer:
            for _ in range(40):
                step(optimizer)

    together([interrupted, survivor])
    (left,) = [message for message in caplog.messages if "replica r0 has left at version" in message]
    assert "; to go on: " in left


def test_a_second_life_knows_where_the_job_is_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """As a script that was killed and started again: its schedule begins at `start_step`."""
    first, second, other = ftopt.local_groups(3, names=["r0", "r0", "r1"], policy=TOGETHER)
    begun: list[int] = []

    def survivor() -> None:
        with wrapped(other)[0] as optimizer:
            while len(begun) < 2:
                step(optimizer)

    def killed_and_started_again() -> None:
        with wrapped(first)[0] as optimizer:
            begun.append(optimizer.start_step)
            for _ in range(20):
                step(optimizer)
        with caplog.at_level(logging.INFO), wrapped(second)[0] as optimizer:
            begun.append(optimizer.start_step)

    together([survivor, killed_and_started_again])
    assert begun[0] == 0 and begun[1] >= 20
    told = [message for message in caplog.messages if "incarnation 2" in message]
    assert told[0].startswith("replica r0 is back as incarnation 2: it trains from the job's version ")
    assert told[0].endswith(f"inner step {begun[1]} on")


def test_a_replica_that_reads_its_checkpoint_while_the_job_goes_on_says_whose_model_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, other = ftopt.local_groups(3, names=["r0", "r0", "r1"], policy=TOGETHER)
    back, left_at = threading.Event(), [10_000]

    def survivor() -> None:
        with wrapped(other)[0] as optimizer:
            while not back.is_set():
                step(optimizer)
                if optimizer.inner_step > left_at[0] + 20:
                    gone_on.set()

    def comes_back() -> None:
        for group in (first, second):
            optimizer, _ = wrapped(group)
            checkpoints = ftopt.Checkpoints(tmp_path, optimizer, every=1, shared=False)
            if group is second:
                gone_on.wait(60)
                checkpoints.resume()
            with optimizer:
                for _ in range(20):
                    step(optimizer)
                    checkpoints.step()
            left_at[0] = optimizer.inner_step
        back.set()

    gone_on = threading.Event()
    together([survivor, comes_back])
    told = [x for x in caplog.messages if "of the checkpoint of version " in x]
    assert len(told) == 1 and told[0].startswith("replica r0 trains from the job's version ")
    assert sum("if other replicas still train, the model comes from them" in x for x in caplog.messages) == 1


def test_what_keeps_steps_out_of_rounds_is_told_the_first_second_and_fourth_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = RoundsLog("r0")
    for version in range(1, 6):
        rounds.goes_on(version, "fewer than policy.min_replicas=2 replicas were there for a round", 10 * version)
    rounds.waits(7, 5.0, ["r0", "r2", "r1"])
    rounds.weighs_nothing(8, "its norm is 1e9 times the usual")
    for seconds, alone in ((1.0, True), (6.0, True), (7.0, True), (0.0, False), (6.0, False)):
        rounds.waits_for_samples(seconds, alone=alone)
    few = "fewer than policy.min_replicas=2 replicas were there for a round; it trains on"
    assert caplog.messages == [
        *(f"replica r0: no version {n} yet: {few}, {10 * n} inner steps pending" for n in (1, 2, 4)),
        "replica r0 has waited 5 s for version 7; r1, r2 took part in the version before; `ftopt status` shows what "
        "each of them is doing",
        "replica r0 contributes nothing to version 8: its norm is 1e9 times the usual; its steps stay pending",
        "replica r0 waits for samples: the job hands them out, and no coordinator answers",
        "replica r0 waits for samples: other replicas hold the rest",
    ]
