"""Replicas whose loops end at about the same time end with one version; who comes later is sent home."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import JobOver, Refused, UserError
from ftopt.optimizer import ReplicaOptimizer
from ftopt.optimizer.ending.at_exit import at_exit
from ftopt.sync.group import ReplicaGroup
from tests.optimizer.running import PATIENT, together
from tests.problems import seeded
from tests.run.running import until
from tests.sync.replica.test_finished import served

METHODS = {
    "DiLoCo": lambda: ftopt.DiLoCo(sync_every=4),
    "LocalSGD": lambda: ftopt.LocalSGD(sync_every=4),
    "SlowMo": lambda: ftopt.SlowMo(sync_every=4),
    "Streaming": lambda: ftopt.StreamingDiLoCo(sync_every=4, fragments=ftopt.fragments.Strided(n=2), delay=1),
    "PAFT": lambda: ftopt.PAFT(sync_every=4),
}


def wrapped(group: ReplicaGroup, method: str = "LocalSGD") -> ReplicaOptimizer:
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, METHODS[method](), group=group)


def step(optimizer: ReplicaOptimizer, seed: int) -> None:
    model = optimizer._core.model
    assert model is not None
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(2, 4, generator=generator)).square().mean().backward()
    optimizer.step()


def leaves(group: ReplicaGroup) -> bool:
    return group.session.heartbeats.state == "leaving"  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", METHODS)
def test_who_ends_first_goes_with_the_version_of_who_ends_last(method: str, caplog: pytest.LogCaptureFixture) -> None:
    groups = ftopt.local_groups(2, policy=replace(PATIENT, grace_s=0.5))
    optimizers = [wrapped(group, method) for group in groups]

    def first() -> str:
        with optimizers[0] as optimizer:
            for seed in range(4):
                step(optimizer, seed)
            optimizer.sync(propose=False)
        return optimizer.digest()

    def last() -> str:
        with optimizers[1] as optimizer:
            for seed in range(4, 8):
                step(optimizer, seed)
            optimizer.sync(propose=False)
            until(lambda: leaves(groups[0]))
            step(optimizer, 8)  # the other's loop has ended
        return optimizer.digest()

    with caplog.at_level(logging.WARNING):
        assert len({*together([first, last])}) == 1
    assert caplog.text.count("final weights of 2 replicas: identical") == 2


def test_who_ends_does_not_wait_for_one_that_trains_on() -> None:
    groups = ftopt.local_groups(2, policy=PATIENT)
    optimizers = [wrapped(group) for group in groups]
    gone = threading.Event()

    def first() -> None:
        with optimizers[0] as optimizer:
            for seed in range(4):
                step(optimizer, seed)
        gone.set()

    def last() -> int:
        with optimizers[1] as optimizer:
            until(lambda: step(optimizer, 1) or gone.is_set())  # type: ignore[func-returns-value]
            return optimizer.local_steps

    assert together([first, last])[1] > 4


def test_replicas_that_one_thread_closes_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ftopt.local_groups(2, policy=PATIENT)
    optimizers = [wrapped(group) for group in groups]
    asked: list[tuple[str, ...]] = []
    wait = type(groups[0]).wait_for_end

    def note(self: ReplicaGroup, inner_step: int, *, but: tuple[str, ...], **more: object) -> object:
        asked.append(tuple(but))
        return wait(self, inner_step, but=but, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(groups[0]), "wait_for_end", note)
    begin = [threading.Thread(target=optimizer._core.start) for optimizer in optimizers[1:]]
    for thread in begin:
        thread.start()
    optimizers[0]._core.start()
    for thread in begin:
        thread.join()
    at_exit.add(optimizers[1]._core.leaving)  # this thread trains both
    for optimizer in optimizers:
        optimizer.close()
    assert asked == [("r1",), ()]


@pytest.fixture
def ended_job(tmp_path: Path, port: int) -> Callable[[str], ReplicaOptimizer]:
    """Makes an optimizer of that replica, in a job whose only replica, r0, has come to its end."""
    _, stop = served(tmp_path / "journal", port, new=True)
    policy = ftopt.FaultPolicy(start_replicas=1, dead_after_s=0.3, start_s=1.0)

    def make(replica: str) -> ReplicaOptimizer:
        return wrapped(ftopt.connect(f"http://127.0.0.1:{port}", replica, job="job", policy=policy))

    with make("r0") as optimizer:
        step(optimizer, 0)
    yield make  # type: ignore[misc]
    stop()


def test_a_replica_that_is_started_again_after_the_end_ends_with_status_0(
    ended_job: Callable[[str], ReplicaOptimizer], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(JobOver) as raised, ended_job("r0"):
        raise AssertionError("its loop runs")
    assert raised.value.code == 0
    assert "replica r0 ends: the job has ended at version 1, inner step 1" in caplog.text


def test_a_replica_of_a_new_job_under_the_name_of_an_ended_one_is_refused(
    ended_job: Callable[[str], ReplicaOptimizer],
) -> None:
    with pytest.raises(Refused, match=r"the job has ended .* give the job another name"), ended_job("r7"):
        raise AssertionError("its loop runs")


def test_one_replica_stops_the_job_and_all_end_with_one_version() -> None:
    """One that joins later finds it stopped, too."""
    groups = ftopt.local_groups(3, policy=replace(PATIENT, grace_s=0.5, start_replicas=2))
    optimizers = [wrapped(group) for group in groups]
    joined = threading.Event()

    def train(number: int) -> tuple[str, str]:
        with optimizers[number] as optimizer:
            if number == 2:
                joined.set()
            while not optimizer.stopped:
                step(optimizer, number)
                if number == 0 and optimizer.local_steps == 6:
                    optimizer.stop("it is good enough")
            stopped = optimizer.stopped
            if number < 2:
                joined.wait(60)
        return stopped, optimizer.digest()

    def join() -> tuple[str, str]:
        until(lambda: bool(optimizers[0].stopped))
        return train(2)

    ends = together([lambda: train(0), lambda: train(1), join])
    assert {stopped for stopped, _ in ends} == {"it is good enough"}
    assert len({digest for _, digest in ends}) == 1


@pytest.mark.parametrize("reason", ["", " ", None, 3])
def test_a_job_is_not_stopped_without_a_reason(reason: object) -> None:
    with pytest.raises(UserError, match="must be the reason"):
        wrapped(ftopt.local_groups(1)[0]).stop(reason)  # type: ignore[arg-type]
