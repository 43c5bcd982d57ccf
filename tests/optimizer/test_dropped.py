"""An optimizer that nobody can close any more, as a notebook's after a cell is run again, leaves by itself."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt._connect import connect, local_groups, solo
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.optimizer import ReplicaOptimizer
from ftopt.optimizer.ending import at_exit
from ftopt.optimizer.leaving import Leaving


def _until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _step(model: nn.Module, optimizer: ReplicaOptimizer, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained(model: nn.Module, method: Method | None = None, **options: Any) -> ReplicaOptimizer:
    inner, group = torch.optim.SGD(model.parameters(), lr=0.1), options.pop("group", None) or solo(**options)
    optimizer = ftopt.wrap(inner, model, method or ftopt.LocalSGD(sync_every=100), group=group)
    _step(model, optimizer)
    return optimizer


class Heard:
    """Keeps what is decided, and who leaves."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def __call__(self, event: Event) -> None:
        if event.event in ("decide", "leave"):
            self.events.append((event.event, sum(member[2] for member in event.data.get("members", []))))

    def left(self) -> bool:
        return any(event == "leave" for event, _ in self.events)


@pytest.fixture(scope="module", autouse=True)
def freezes() -> None:
    """All that is there already need not be looked through by each collection."""
    before = threading.active_count()
    _trained(nn.Linear(4, 2)).close()  # with it comes the rest of torch
    _until(lambda: threading.active_count() <= before)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def all_leave() -> Any:
    gc.collect()
    before = threading.active_count()
    yield
    gc.collect()
    _until(lambda: threading.active_count() <= before)


def test_its_steps_are_handed_in_and_nothing_of_it_stays(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    for _ in range(3):
        model, heard = nn.Linear(4, 2), Heard()
        optimizer = _trained(model, on_event=heard)
        gone = [weakref.ref(x) for x in (model, optimizer, optimizer._core.started())]
        del model, optimizer
        gc.collect()  # torch's first step leaves cycles
        _until(lambda heard=heard: heard.left() and threading.active_count() == before)
        gc.collect()
        assert [x() for x in gone] == [None] * 3
        assert heard.events == [("decide", 3), ("leave", 0)]
    assert caplog.text.count("its optimizer was dropped without close(): they are handed in now") == 3
    assert "has left with" not in caplog.text


def test_its_model_is_not_touched_any_more() -> None:
    model, heard = nn.Linear(4, 2), Heard()
    group, peer = local_groups(2, policy=ftopt.FaultPolicy(min_replicas=1, start_replicas=2), on_event=heard)
    other = copy.deepcopy(model)
    thread = threading.Thread(target=lambda: _trained(other, group=peer).close())
    thread.start()
    optimizer = _trained(model, group=group)
    trained = model.weight.detach().clone()
    del optimizer
    gc.collect()
    thread.join(60)
    _until(lambda: sum(event == "leave" for event, _ in heard.events) == 2)
    assert sum(steps for event, steps in heard.events if event == "decide") == 6
    assert torch.equal(model.weight, trained)


def test_it_does_not_end_the_job_with_a_version_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    group, peer = local_groups(2, policy=ftopt.FaultPolicy(min_replicas=1, start_replicas=2), on_event=heard)
    method = ftopt.LocalSGD(sync_every=3)

    def train_on() -> None:
        model = nn.Linear(4, 2)
        with _trained(model, method, group=peer) as optimizer:

            def more() -> bool:
                _step(model, optimizer)
                return heard.left()

            _until(more)

    thread = threading.Thread(target=train_on)
    thread.start()
    _trained(nn.Linear(4, 2), method, group=group)  # and dropped
    gc.collect()
    thread.join(60)
    assert heard.left()
    assert "ended with another one" not in caplog.text


def test_what_changes_the_model_afterwards_is_not_handed_in(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, heard = nn.Linear(4, 2), Heard()
    optimizer = _trained(model, on_event=heard)
    go_on, part = threading.Event(), Leaving.part_from_model
    monkeypatch.setattr(Leaving, "part_from_model", lambda self: (go_on.wait(60), part(self))[1])
    del optimizer
    gc.collect()
    nn.init.zeros_(model.weight)
    go_on.set()
    _until(heard.left)
    assert heard.events == [("leave", 0)]
    lost = "has left with 3 inner steps that no committed state contains: its optimizer was dropped without close()"
    _until(lambda: lost in caplog.text)
    assert "it leaves its job without handing them in: the parameters have been changed since" in caplog.text


@pytest.mark.parametrize("method", [ftopt.SyncSGD(), ftopt.PAFT(sync_every=2)])
def test_where_replicas_take_their_steps_together_it_leaves_at_once(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, heard = nn.Linear(4, 2), Heard()
    optimizer = _trained(model, method, on_event=heard)
    applied = list[str]()
    monkeypatch.setattr(type(optimizer._core.started()), "apply", lambda self: applied.append("after the drop"))
    del optimizer
    gc.collect()
    _until(heard.left)
    assert not applied  # an agreed gradient would change the model


class TurnsTo(torch.optim.SGD):
    """Swaps weights when it is turned to an evaluation and back, as schedule-free optimizers do."""

    turned: list[str]

    def eval(self) -> None:
        """To the weights that are evaluated."""
        self.turned.append("eval")

    def train(self) -> None:
        """And back."""
        self.turned.append("train")


def test_one_that_is_dropped_in_an_evaluation_leaves_the_inner_optimizer_alone() -> None:
    model, heard = nn.Linear(4, 2), Heard()
    inner = TurnsTo(model.parameters(), lr=0.1)
    inner.turned = turned = []
    optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=100), group=solo(on_event=heard))
    _step(model, optimizer)
    optimizer.eval()
    before, turned[:] = model.weight.detach().clone(), []
    del optimizer
    gc.collect()
    _until(lambda: heard.left() and "ftopt-leaving" not in [thread.name for thread in threading.enumerate()])
    assert turned == []
    assert torch.equal(model.weight, before)


def test_a_model_whose_optimizer_lives_is_refused_when_it_is_wrapped_again() -> None:
    model = nn.Linear(4, 2)
    optimizer = _trained(model)
    inner, group = torch.optim.SGD(model.parameters(), lr=0.1), solo()
    with pytest.raises(UserError, match=r"trained as replica 'r0' already.*run optimizer\.close\(\), then this cell"):
        optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=100), group=group)
    optimizer.close()
    optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=100), group=group)
    _step(model, optimizer)
    optimizer.close()


def test_a_model_whose_optimizer_is_only_kept_by_a_cycle_can_be_wrapped_again() -> None:
    model, heard = nn.Linear(4, 2), Heard()
    optimizer = _trained(model, on_event=heard)
    optimizer.itself = optimizer  # type: ignore[attr-defined]
    gc.disable()
    try:
        del optimizer
        again = _trained(model)
    finally:
        gc.enable()
    _until(heard.left)
    assert heard.events == [("decide", 3), ("leave", 0)]
    again.close()


def test_a_cell_that_makes_model_and_optimizer_can_be_run_again() -> None:
    for _ in range(3):
        model = nn.Linear(4, 2)
        optimizer = _trained(model)
    optimizer.close()


def test_a_loader_and_checkpoints_do_not_keep_it(tmp_path: Any) -> None:
    model, heard = nn.Linear(4, 2), Heard()
    group = solo(on_event=heard)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=100), group=group)
    checkpoints = ftopt.Checkpoints(tmp_path, optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(20, 4))
    loader = ftopt.DataLoader(data, 2, group=group, seed=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    checkpoints.include(loader=loader, scheduler=scheduler)
    for _ in zip(range(3), loader, strict=False):
        _step(model, optimizer, 1)
        checkpoints.step()
    del optimizer, checkpoints, scheduler
    gc.collect()
    _until(heard.left)
    assert heard.events == [("decide", 3), ("leave", 0)]
    _until(lambda: group.closed)
    del loader


def test_a_group_that_nobody_joins_leaves_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before, model = threading.active_count(), nn.Linear(4, 2)
    groups = [solo(), *local_groups(2), connect("http://127.0.0.1:29410", replica="r0")]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=1), group=groups[0])
    assert threading.active_count() == before
    wrapped.close()


def test_a_loader_whose_optimizer_is_gone_says_so() -> None:
    model, group = nn.Linear(4, 2), solo()
    loader = ftopt.DataLoader(torch.utils.data.TensorDataset(torch.ones(20, 4)), 2, group=group, seed=0)
    ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.LocalSGD(sync_every=1), group=group)
    gc.collect()
    with pytest.raises(UserError, match=r"group is gone; keep what ftopt\.wrap\(\) returns"):
        next(iter(loader))


def test_another_thread_may_find_it_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is collected on any thread, and another one joins as the same replica at this moment."""
    start, joined, errors = at_exit._Dropped.start, threading.Event(), list[BaseException]()

    def join_first(self: threading.Thread) -> None:
        def join() -> None:
            try:
                at_exit.at_exit.await_dropped("r0")
            except BaseException as error:
                errors.append(error)
            joined.set()

        threading.Thread(target=join).start()
        assert not joined.wait(0.2), "it waits for what has not started yet"
        start(self)

    monkeypatch.setattr(at_exit._Dropped, "start", join_first)
    optimizer = _trained(nn.Linear(4, 2), group=local_groups(1)[0])
    del optimizer
    gc.collect()
    assert joined.wait(60) and not errors
