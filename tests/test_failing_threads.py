"""Whatever is raised on a thread of ftopt, in a task or a callback, is raised in the user's thread, with its cause.

Each test plants an error in a function that another thread runs, and trains on until it comes out.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import FtoptError
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.sync.replica.loop import LoopThread
from tests.optimizer.running import together
from tests.problems import seeded
from tests.sync.server.access import TOKEN, coordinator_thread

FAST = ftopt.FaultPolicy(heartbeat_s=0.05, dead_after_s=2.0, grace_s=0.2)
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


def of(group: ftopt.ReplicaGroup, method: Method, *, seed: int = 0) -> tuple[ftopt.ReplicaOptimizer, nn.Module]:
    with seeded(seed):
        model = nn.Linear(8, 4)
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, method, group=group), model


def train(optimizer: ftopt.ReplicaOptimizer, model: nn.Module, *, steps: int = LIMIT) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()


@contextmanager
def comes_out(plant: Plant) -> Iterator[None]:
    """The user sees the planted error, or what it has caused."""
    with pytest.raises(FtoptError) as raised:
        yield
    assert plant.sprung.is_set()
    chain: BaseException | None = raised.value
    causes = []
    while chain is not None:
        causes.append(chain)
        chain = chain.__cause__
    assert repr(plant.error) in map(repr, causes[1:])  # asyncio may hand on a copy


LOCAL_SGD = ftopt.LocalSGD(sync_every=3)
DELAYED = ftopt.StreamingDiLoCo(sync_every=4, delay=2, fragments=ftopt.fragments.Balanced(n=1))

IN_EVERY_JOB = {
    "a message": "sync.replica.session:Session._receive",
    "a proposal": "sync.replica.session:Session.accept",
    "what the machine asks for": "sync.replica.session:Session._perform",
    "the heartbeat": "sync.protocol.messages:Heartbeat.__init__",
    "publishing": "sync.replica.view:View.publish",
    "a commit": "step.outer.reduction:Reduction.commit",
    "the reducer": "step.outer.reduction:Reduction.reduce",
    "the reducer's groups": "sync.replica.reducer:Reducer._group",
    "the reducer, on its way to the network thread": "sync.replica.reducer:bits",
    "reducing": "step.outer.mean:Mean.reduce",
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", IN_EVERY_JOB.values(), ids=IN_EVERY_JOB)
def test_what_a_thread_of_a_replica_raises_comes_out(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    if error is TimeoutError and "reduc" in where:
        pytest.skip("a transport's error: the attempt fails, and is made again")
    plant = Plant(monkeypatch, where, error)
    optimizer, model = of(ftopt.local_groups(1, policy=FAST)[0], LOCAL_SGD)
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
    groups = ftopt.local_groups(2, policy=FAST)
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
    "the state that is served": ("r0", "step.outer.reduction:Reduction.state"),
    "the state that is fetched": ("r1", "sync.local:LocalState.fetch"),
    "a fetch": ("r1", "sync.replica.fetcher:Fetcher._take"),
    "the install": ("r1", "step.outer.reduction:Reduction.install"),
    "its welcome": ("r1", "sync.protocol.replica.machine:Replica.fetched"),
}


@pytest.mark.parametrize("error", [Planted, SystemExit], ids=lambda error: error.__name__)
@pytest.mark.parametrize(("who", "where"), JOINING.values(), ids=JOINING)
def test_what_goes_wrong_when_a_state_is_fetched_comes_out(
    who: str, where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(monkeypatch, where, error)
    groups = ftopt.local_groups(
        2, policy=ftopt.FaultPolicy(start_replicas=1, heartbeat_s=0.05, dead_after_s=2.0, grace_s=0.2)
    )
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
        except FtoptError as raised:
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
        except (FtoptError, SystemExit) as raised:
            assert plant.error in (raised, raised.__cause__)
            told.append("r1")
        finally:
            joined.set()

    told: list[str] = []
    together([r0, r1])
    assert plant.sprung.is_set() and who in told


REPLAY = {
    "its own copy": "sync.replica.copies:Copies.offer",
    "a neighbour's copy": "sync.replica.copies:Copies._fetch",
}


@pytest.mark.parametrize("error", [Planted, SystemExit], ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", REPLAY.values(), ids=REPLAY)
def test_what_goes_wrong_with_copies_for_neighbours_comes_out(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(monkeypatch, where, error)
    groups = ftopt.local_groups(
        2, policy=ftopt.FaultPolicy(recover="replay", heartbeat_s=0.05, dead_after_s=2.0, grace_s=0.2)
    )
    ready, told = threading.Barrier(2, action=plant.armed.set), list[BaseException]()

    def replica(m: int) -> None:
        loader = ftopt.DataLoader([torch.ones(8)] * 64, group=groups[m], epochs=None)
        optimizer, model = of(groups[m], LOCAL_SGD)
        plant.training.add(threading.get_ident())
        optimizer.__enter__()
        ready.wait(30.0)
        try:
            for _ in loader:
                train(optimizer, model, steps=1)
                if told:
                    break
        except FtoptError as raised:
            told.append(raised)
        optimizer.close(flush=False)

    together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]
    assert plant.error in [raised.__cause__ for raised in told]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_what_a_checkpoints_thread_raises_comes_out_of_the_loops_next_call(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant = Plant(monkeypatch, "checkpoint.writer:_write", error)
    plant.armed.set()
    optimizer, model = of(ftopt.solo(), LOCAL_SGD)
    checkpoints = ftopt.Checkpoints(tmp_path, optimizer, every=1)
    with optimizer:
        if error is TimeoutError:  # an OSError: a disk that has failed is logged, and training goes on
            train(optimizer, model, steps=4)
            assert checkpoints.step()
            checkpoints.close()
            return
        with comes_out(plant):
            while True:
                train(optimizer, model, steps=1)
                checkpoints.step()
        assert checkpoints._writer.wait(60.0)  # the thread has told its error before it takes the next part
        train(optimizer, model, steps=3)
        assert checkpoints.step(), "the thread is still there"
        with comes_out(plant):
            checkpoints.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_what_looking_for_a_checkpoint_raises_comes_out_of_the_start(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant = Plant(monkeypatch, "checkpoint.resuming:Resuming.newest", error)
    plant.armed.set()
    optimizer, _ = of(ftopt.solo(), LOCAL_SGD)
    ftopt.Checkpoints(tmp_path, optimizer)
    with comes_out(plant):
        optimizer.__enter__()
    optimizer.close()


def test_a_loader_that_waits_for_units_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = Plant(monkeypatch, "sync.replica.units:Units.grant", Planted)
    plant.armed.set()
    group = ftopt.local_groups(1, policy=FAST)[0]
    loader = ftopt.DataLoader([torch.ones(8)] * 64, group=group)
    optimizer, _ = of(group, LOCAL_SGD)
    with comes_out(plant):
        optimizer.__enter__()
        next(iter(loader))
    optimizer.close(flush=False)


ON_SOCKETS = {
    "the WebSocket's reader": "sync.replica.connection:Connection._hear",
    "the WebSocket's writer": "sync.replica.session:m.encode",
    "serving": "transport.state_server:StateImage.__init__",
}


@pytest.mark.parametrize("error", [Planted, SystemExit], ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", ON_SOCKETS.values(), ids=ON_SOCKETS)
def test_what_a_replica_with_sockets_raises_comes_out(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(monkeypatch, where, error)
    with coordinator_thread() as url:
        policy = ftopt.FaultPolicy(start_replicas=1, heartbeat_s=0.05, dead_after_s=2.0, grace_s=0.2)
        groups = [ftopt.connect(url, f"r{m}", token=TOKEN, policy=policy, host="127.0.0.1") for m in range(2)]
        first, ended = threading.Event(), threading.Event()

        def r0() -> None:
            optimizer, model = of(groups[0], LOCAL_SGD)
            plant.training.add(threading.get_ident())
            optimizer.__enter__()
            plant.armed.set()
            first.set()
            try:
                with comes_out(plant):
                    train(optimizer, model)
            finally:
                plant.armed.clear()
                ended.wait(30.0)
                optimizer.close(flush=False)

        def r1() -> None:
            assert first.wait(30.0)
            optimizer, _ = of(groups[1], LOCAL_SGD, seed=1)
            try:
                if "state_server" in where:
                    optimizer.__enter__()
            finally:
                optimizer.close(flush=False)
                ended.set()

        together([r0, r1])


def test_a_thread_for_blocking_work_that_is_shared_tells_all_its_users() -> None:
    network, told = LoopThread("ftopt-test"), list[tuple[str, BaseException]]()
    users = [lambda error, name=name: told.append((name, error)) for name in "ab"]  # type: ignore[misc]
    for user in users:
        network.acquire(user)
    here = threading.Event()

    def fails() -> None:
        raise Planted

    def exits() -> None:
        raise SystemExit

    for call in (fails, exits, here.set):
        assert network.soon(call)
    assert here.wait(30.0), "it goes on"
    assert [(name, type(error)) for name, error in told] == [
        ("a", Planted), ("b", Planted), ("a", SystemExit), ("b", SystemExit),
    ]  # fmt: skip
    for user in users:
        network.release(user)


def test_on_event_may_raise_whenever_it_likes(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def on_event(event: Event) -> None:
        told.append(event.event)
        raise RuntimeError("no disk left")

    groups = ftopt.local_groups(2, policy=ftopt.FaultPolicy(grace_s=30.0), on_event=on_event)

    def replica(m: int) -> int:
        optimizer, model = of(groups[m], DELAYED, seed=m)
        with optimizer:
            train(optimizer, model, steps=12)
            optimizer.sync()
        return optimizer.pending_steps

    assert together([lambda m=m: replica(m) for m in range(2)]) == [0, 0]  # type: ignore[misc]
    assert {"propose", "reduce", "prepare", "commit", "apply"} <= {*told}
    shown = [record for record in caplog.records if "on_event raised" in record.getMessage()]
    assert 1 <= len(shown) <= 3, "once for each of the replicas, and for the coordinator"
