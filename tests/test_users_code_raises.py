"""The user's code is called where it can break nothing: what it raises is told, and every step is counted once.

| the user's code | thread | what it raises |
|---|---|---|
| ``on_event`` | any | is logged once; `SystemExit` ends the membership when what was announced has taken effect |
| a trigger | training | a `UserError` of ``step()``; asked again at the next step |
| `Method`, outer optimizers | training, reducer | a `UserError` (``tests/methods/test_own_method.py``) |
| inner optimizer, its hooks, closures | training | comes out of ``step()``, as in a loop without ftopt |
| data sets, collate functions, `Checkpoints.include` | training, workers | comes out of the loop (``tests/data``) |
| handlers of `logging` | any | is ignored where nothing else could be done |
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import nn

import ftopt
from ftopt import events
from ftopt.errors import FtoptError, UserError
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.triggers import Due, Progress
from tests.optimizer.running import PATIENT, together
from tests.problems import seeded

STEPS = 12
HALVES = ftopt.fragments.Balanced(n=2)
METHODS = {
    "local_sgd": ftopt.LocalSGD(sync_every=3),
    "diloco": ftopt.DiLoCo(sync_every=3),
    "streaming": ftopt.StreamingDiLoCo(sync_every=4, delay=2, fragments=HALVES, wait_for_result_s=60.0),
    "decoupled": ftopt.DecoupledDiLoCo(sync_every=4, adaptive_grace=0.0, fragments=HALVES, wait_for_result_s=60.0),
    "slowmo": ftopt.SlowMo(sync_every=3),
    "paft": ftopt.PAFT(sync_every=3),
    "sync_sgd": ftopt.SyncSGD(),
    "averages": ftopt.DiLoCo(sync_every=3, average_until_step=4),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


class Mine(Exception):
    """The user's."""


@dataclass
class Replica:
    """One replica's loop; ``raised`` are the user's errors that it has caught."""

    group: ftopt.ReplicaGroup
    method: Method
    m: int
    raised: list[BaseException] = field(default_factory=list)
    closure: Callable[[Replica], object] | None = None

    def __post_init__(self) -> None:
        with seeded():
            self.model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = ftopt.wrap(self.inner, self.model, self.method, group=self.group)
        self.taken = 0  # without those that have raised

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        x = torch.sin(torch.arange(16.0).reshape(2, 8) + self.m + 3 * self.taken)
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        try:
            if self.closure is None:
                self.loss()
                self.optimizer.step()
            else:
                self.optimizer.step(lambda: self.closure(self))  # type: ignore[misc]
        except Mine as error:
            self.raised.append(error)
        else:
            self.taken += 1

    def train(self, steps: int = STEPS) -> None:
        while self.optimizer.local_steps < steps:
            self.step()


@dataclass(frozen=True)
class Ended:
    """What a replica's training has come to."""

    anchor: str
    inner_step: int
    pending: tuple[int, ...]
    parameters: list[Any]

    @property
    def shared(self) -> tuple[str, int]:
        return self.anchor, self.inner_step


def train(*replicas: Replica) -> list[Ended]:
    """Trains them until all that they have proposed is decided."""
    meet = threading.Barrier(len(replicas), timeout=60.0)

    def run(replica: Replica) -> Ended:
        optimizer = replica.optimizer.__enter__()
        replica.train()
        assert optimizer.sync(propose=False)
        meet.wait()
        parameters = [p.tolist() for p in replica.model.parameters()]
        inner_step, pending = optimizer.status.committed_step, optimizer.status.pending_steps
        found = Ended(optimizer.digest(), inner_step, pending, parameters)
        meet.wait()
        optimizer.close(flush=False)
        return found

    return together([lambda replica=replica: run(replica) for replica in replicas])  # type: ignore[misc]


def of(method: Method, on_event: Callable[[Event], None] = events.ignore, **more: Any) -> list[Replica]:
    groups = ftopt.local_groups(2, policy=PATIENT, on_event=on_event)
    return [Replica(group, method, m, **more) for m, group in enumerate(groups)]


@every_method
def test_an_on_event_that_always_raises_changes_nothing(method: Method, caplog: pytest.LogCaptureFixture) -> None:
    told = set[str]()

    def on_event(event: Event) -> None:
        told.add(event.event)
        raise OSError("no space left on device")

    assert train(*of(method, on_event)) == train(*of(method))
    assert {
        "inner",
        "stepped",
        "propose",
        "gather",
        "reduce",
        "payload",
        "prepare",
        "commit",
        "apply",
        "decide",
    } <= told
    shown = [record.getMessage() for record in caplog.records if "on_event raised" in record.getMessage()]
    assert len(shown) == 3, "once for each replica, and for the coordinator"


@pytest.mark.parametrize("error", [SystemExit, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)])
@pytest.mark.parametrize("event", ["gather", "reduce", "payload", "reduce.after", "prepare", "commit", "decide"])
def test_an_on_event_that_exits_ends_the_membership_when_what_it_heard_of_has_taken_effect(
    event: str, error: type[BaseException]
) -> None:
    exits = error("enough")

    def on_event(e: Event) -> None:
        if (e.event, e.replica == "r1", e.version) == (event, False, 2):
            raise exits

    def run(replica: Replica) -> BaseException | None:
        replica.optimizer.__enter__()
        try:
            replica.train()
        except FtoptError as raised:
            return raised.__cause__
        finally:
            replica.optimizer.close(flush=False)
        return None

    first, second = of(METHODS["local_sgd"], on_event)
    causes = together([lambda: run(first), lambda: run(second)])
    assert causes[0] is exits
    if event in ("commit", "decide"):
        committed = first.optimizer._core.standing().committed
        assert committed.version >= 2, "it ends soon, and may be in the next round by then, or fetch what others make"
        assert first.optimizer.pending_steps == first.optimizer.local_steps - committed.counted_step
    if event != "decide":
        assert causes[1] is None and second.optimizer.pending_steps == 0, "the other one trains on"
        assert second.optimizer.version == STEPS // 3


def test_an_on_event_may_only_look(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_SLOW_S", math.inf)
    refused = list[str]()

    def on_event(event: Event) -> None:
        optimizer = solo.optimizer
        for call in (
            optimizer.step,
            optimizer.sync,
            lambda: optimizer.sync(propose=False),
            optimizer.close,
            optimizer.__enter__,
        ):
            try:
                call()
            except (UserError, RuntimeError) as error:  # RuntimeError: not started, or closed
                refused.append(f"{event.event}: {error}")

    solo = Replica(ftopt.solo(on_event=on_event), METHODS["local_sgd"], 0)
    train(solo)
    assert "commit: close() in on_event, at the event 'commit'; an on_event may only look" in " ".join(refused)
    assert {text.split(" ")[1] for text in refused} >= {"step()", "sync()", "close()"}
    assert not caplog.records


def test_an_on_event_that_takes_long_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_SLOW_S", -1.0)
    train(Replica(ftopt.solo(on_event=lambda event: None), METHODS["local_sgd"], 0))
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == 2 and all("peers may have taken this process for dead" in text for text in shown)


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no space left on device")


@contextmanager
def broken_log() -> Iterator[None]:
    handler = Broken()
    logging.getLogger("ftopt").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("ftopt").removeHandler(handler)


def test_a_handler_that_raises_keeps_no_error_from_the_user() -> None:
    def on_event(event: Event) -> None:
        if event.event == "commit":
            raise SystemExit if event.version == 3 else Mine

    replica = Replica(ftopt.solo(on_event=on_event), METHODS["local_sgd"], 0)
    with broken_log():
        replica.optimizer.__enter__()
        with pytest.raises(FtoptError) as raised:
            replica.train(1000)
        assert isinstance(raised.value.__cause__, SystemExit)
        assert replica.optimizer.version == 3
        replica.optimizer.close(flush=False)


@dataclass(frozen=True)
class Failing(ftopt.triggers.Trigger):
    """Due every other step; ``fails`` at the steps of it."""

    what: str
    fails: Any

    def due(self, progress: Progress) -> Due:
        if self.what == "due" and progress.local_steps in self.fails:
            raise Mine("due")
        return Due.YES if progress.steps >= 2 else Due.NO

    def needs(self, progress: Progress) -> ftopt.triggers.Measurement:
        if self.what == "needs" and progress.local_steps in self.fails:
            raise Mine("needs")
        return ftopt.triggers.Measurement.NONE


@pytest.mark.parametrize(
    ("method", "what"),
    [("local_sgd", "due"), ("local_sgd", "needs"), ("streaming", "needs"), ("slowmo", "due"), ("paft", "due")],
)
def test_a_trigger_that_raises_is_told_of_and_asked_again(method: str, what: str) -> None:
    trigger = Failing(what, (1, 2, 5))
    one = dataclasses.replace(METHODS[method], sync_every=20, trigger=trigger)

    class Careful(Replica):
        def step(self) -> None:
            try:
                super().step()
            except UserError as error:
                assert f"Failing.{what}() failed: Mine: {what}" in str(error)
                assert isinstance(error.__cause__, Mine)
                self.raised.append(error)  # the step itself was taken
            versions, digest = self.optimizer.status.versions, self.optimizer.digest()
            if versions == self.optimizer.status.versions:  # no commit came in between
                digests[self.m][versions] = digest

    digests: tuple[dict[tuple[int, ...], str], ...] = ({}, {})
    # Where they fail shifts the rounds of one against those of the other, who may be left out at its end.
    groups = ftopt.local_groups(2, policy=dataclasses.replace(PATIENT, grace_s=0.5))
    replicas = [Careful(group, one, m) for m, group in enumerate(groups)]
    train(*replicas)
    common = digests[0].keys() & digests[1].keys()
    assert common and all(digests[0][versions] == digests[1][versions] for versions in common)
    assert all(isinstance(error, UserError) for replica in replicas for error in replica.raised)
    assert all(len(replica.raised) >= 2 and replica.optimizer.local_steps == STEPS for replica in replicas)


WHERE = ["half", "pre", "post", "closure"]


def cases() -> Iterator[ParameterSet]:
    """All places for a method of each kind: of parameters, of gradients, of both. One for each other method."""
    for number, name in enumerate(METHODS):
        for where in WHERE if name in ("local_sgd", "sync_sgd", "paft") else [WHERE[number % len(WHERE)]]:
            yield pytest.param(METHODS[name], where, id=f"{name}-{where}")


@pytest.mark.parametrize(("method", "where"), list(cases()))
def test_an_inner_step_that_raises_is_never_taken_again_by_itself(method: Method, where: str) -> None:
    """Once, on one replica of two. What replicas do alike they have alike, or say that they do not."""
    first, second = of(method)
    calls = 0

    def raises(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise Mine

    if where == "half":
        inner_step = first.inner.step

        def half(*args: Any) -> Any:
            parameter = next(first.model.parameters())
            with torch.no_grad():
                before = parameter.clone()
                parameter.sub_(0.01)
                raises()
                parameter.copy_(before)
            return inner_step(*args)

        first.inner.step = half  # type: ignore[method-assign]
    elif where == "closure":
        first.closure = lambda replica: (replica.loss(), raises())[0]  # type: ignore[func-returns-value]
    else:
        getattr(first.inner, f"register_step_{where}_hook")(raises)
    if method.name != "sync_sgd" or where == "closure":
        ended = train(first, second)
        assert len(first.raised) == 1
        assert ended[0].shared == ended[1].shared
        return

    def refused() -> None:
        first.optimizer.__enter__()
        with pytest.raises(FtoptError, match="was broken off by Mine") as raised:
            first.train()
        assert raised.value.__cause__ is first.raised[0]
        with pytest.raises(FtoptError, match="was broken off by Mine"):
            first.optimizer.sync()
        first.optimizer.close(flush=False)

    def goes_on() -> None:
        with second.optimizer:
            second.train()

    together([refused, goes_on])
    assert second.optimizer.status.committed_step == STEPS


@pytest.mark.parametrize("fetched", [False, True])
def test_a_step_that_one_alone_has_broken_off_ends_it_only_if_a_peer_may_have_taken_it(fetched: bool) -> None:
    """A peer that fetches the version before this replica has used its gradient takes that step."""

    def on_event(event: Event) -> None:
        if fetched and event.event == "apply" and event.version == 3:
            gradients = replica.optimizer._core.started().gradients
            assert gradients is not None
            _, tensors = gradients.serve()
            assert "gradient" in tensors

    def raises(*_: object) -> None:
        if replica.optimizer.version == 3:
            handle.remove()
            raise Mine

    replica = Replica(ftopt.solo(on_event=on_event), METHODS["sync_sgd"], 0)
    handle = replica.inner.register_step_pre_hook(raises)
    with replica.optimizer:
        while not replica.raised:
            replica.step()
        if not fetched:
            replica.train()
            return
        with pytest.raises(FtoptError, match="was broken off by Mine"):
            replica.step()
