"""Whatever is raised on a thread of ftopt, in a task or a callback, is raised in the user's thread, with its cause.

Each test plants an error in a function that another thread runs, and trains on until it comes out.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from tests.optimizer.running import together

FAST = ftopt.Sync(heartbeat_s=0.05, dead_after_s=2.0, grace_s=0.2)
LIMIT = 30_000
"""Steps after which an error that has not come out is lost. It takes as long as a heartbeat."""


class Planted(Exception):
    pass


ERRORS: list[type[BaseException]] = [Planted, TimeoutError, SystemExit, KeyboardInterrupt]


class Plant:
    """Raises in the place of a function, once `armed`, and not on the threads that train."""

    def __init__(self, patch: pytest.MonkeyPatch, where: str, error: type[BaseException]) -> None:
        module, _, path = where.partition(":")
        owner: Any = importlib.import_module(f"ftopt.{module}")
        *parts, name = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        original = getattr(owner, name)
        self.error = error("planted")
        self.armed, self.sprung = threading.Event(), threading.Event()
        self.training = {threading.get_ident()}

        def planted(*args: Any, **kwargs: Any) -> Any:
            if self.armed.is_set() and threading.get_ident() not in self.training:
                self.sprung.set()
                raise self.error
            return original(*args, **kwargs)

        patch.setattr(owner, name, planted)


def of(group: ftopt.ReplicaGroup, method: ftopt.Method, *, seed: int = 0) -> tuple[ftopt.OuterOptimizer, nn.Module]:
    torch.manual_seed(seed)
    model = nn.Linear(8, 4)
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, method, group=group), model


def train(optimizer: ftopt.OuterOptimizer, model: nn.Module, *, steps: int = LIMIT) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()


@contextmanager
def comes_out(plant: Plant) -> Iterator[None]:
    """The user sees the planted error, or what it has caused."""
    with pytest.raises(ftopt.FtoptError) as raised:
        yield
    assert plant.sprung.is_set()
    chain: BaseException | None = raised.value
    causes = []
    while chain is not None:
        causes.append(chain)
        chain = chain.__cause__
    assert plant.error in causes[1:], f"{causes}"


LOCAL_SGD = ftopt.LocalSGD(sync_every=3)
DELAYED = ftopt.StreamingDiLoCo(sync_every=4, delay=2, fragments=ftopt.fragments.Balanced(n=1))

IN_EVERY_JOB = {
    "a message": "sync.replica.session:Session._hear",
    "a proposal": "sync.replica.session:Session.accept",
    "what the machine asks for": "sync.replica.session:Session._perform",
    "the heartbeat": "sync.protocol.messages:Heartbeat.__init__",
    "publishing": "sync.replica.view:View.publish",
    "a commit": "optimizer.outer.reduction:Reduction.commit",
    "the reducer": "optimizer.outer.reduction:Reduction.reduce",
    "the reducer's groups": "sync.replica.reducer:Reducer._group",
    "the reducer, on its way to the network thread": "sync.replica.reducer:bits",
    "reducing": "optimizer.outer.mean:Mean.reduce",
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", IN_EVERY_JOB.values(), ids=IN_EVERY_JOB)
def test_what_a_thread_of_a_replica_raises_comes_out(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    if error is TimeoutError and "reduc" in where:
        pytest.skip("a transport's error: the attempt fails, and is made again")
    plant = Plant(monkeypatch, where, error)
    optimizer, model = of(ftopt.local_groups(1, sync=FAST)[0], LOCAL_SGD)
    optimizer.__enter__()
    train(optimizer, model, steps=7)
    plant.armed.set()
    with comes_out(plant):
        train(optimizer, model)
    with comes_out(plant):
        optimizer.sync()
    with comes_out(plant):
        optimizer.close()
    optimizer.close()


def test_what_the_freezer_raises_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in ERRORS:
        plant = Plant(monkeypatch, "optimizer.outer.freeze:Freezer._copy_and_offer", error)
        optimizer, model = of(ftopt.solo(), DELAYED)
        optimizer.__enter__()
        plant.armed.set()
        with comes_out(plant):
            train(optimizer, model)
        optimizer.close(flush=False)
        monkeypatch.undo()


COORDINATOR = {
    "a message": "sync.server.job:Job.receive",
    "its timer": "sync.server.job:Job._tick",
    "an effect": "sync.server.job:Job._perform",
    "its journal": "sync.server.journal:Journal.write",
}


@pytest.mark.parametrize("error", [Planted, SystemExit], ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", COORDINATOR.values(), ids=COORDINATOR)
def test_what_a_coordinator_in_this_process_raises_comes_out_in_all_its_replicas(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(monkeypatch, where, error)
    groups = ftopt.local_groups(2, sync=FAST)
    ready = threading.Barrier(2, action=plant.armed.set)

    def replica(m: int) -> None:
        optimizer, model = of(groups[m], LOCAL_SGD)
        plant.training.add(threading.get_ident())
        optimizer.__enter__()
        ready.wait(30.0)
        with comes_out(plant):
            if m:  # r0 waits in its round, until it is time to call r1 in
                assert plant.sprung.wait(30.0)
            train(optimizer, model)
        optimizer.close(flush=False)

    together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]


JOINING = {
    "the state that is served": ("r0", "optimizer.outer.reduction:Reduction.state"),
    "the state that is fetched": ("r1", "sync.local:LocalState.fetch"),
    "a fetch": ("r1", "sync.replica.fetcher:Fetcher._take"),
    "the install": ("r1", "optimizer.outer.reduction:Reduction.install"),
    "its welcome": ("r1", "sync.protocol.replica.machine:Replica.fetched"),
}


@pytest.mark.parametrize("error", [Planted, SystemExit], ids=lambda error: error.__name__)
@pytest.mark.parametrize(("who", "where"), JOINING.values(), ids=JOINING)
def test_what_goes_wrong_when_a_state_is_fetched_comes_out(
    who: str, where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(monkeypatch, where, error)
    groups = ftopt.local_groups(2, sync=ftopt.Sync(start_replicas=1, heartbeat_s=0.05, dead_after_s=2.0, grace_s=0.2))
    first, joined = threading.Event(), threading.Event()

    def r0() -> None:
        optimizer, model = of(groups[0], LOCAL_SGD)
        plant.training.add(threading.get_ident())
        optimizer.__enter__()
        train(optimizer, model, steps=4)
        plant.armed.set()
        first.set()
        try:
            while not joined.is_set():
                train(optimizer, model, steps=1)
        except ftopt.FtoptError as raised:
            assert raised.__cause__ is plant.error
            told.append("r0")
            plant.armed.clear()  # its network thread goes on to serve
            assert joined.wait(30.0)
        finally:
            optimizer.close(flush=False)

    def r1() -> None:
        optimizer, _ = of(groups[1], LOCAL_SGD, seed=1)
        plant.training.add(threading.get_ident())
        assert first.wait(30.0)
        try:
            optimizer.__enter__()
            optimizer.close(flush=False)
        except (ftopt.FtoptError, SystemExit) as raised:
            assert plant.error in (raised, raised.__cause__)
            told.append("r1")
        finally:
            joined.set()

    told: list[str] = []
    together([r0, r1])
    assert plant.sprung.is_set() and who in told
