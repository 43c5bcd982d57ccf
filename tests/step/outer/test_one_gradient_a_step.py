"""Replicas that take every step alike take it at the rate that the loop has set for it, also one that was away: no call
takes two agreed gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.events import Event
from ftopt.methods import Method
from tests.optimizer.running import together
from tests.problems import seeded

METHODS = pytest.mark.parametrize("method", [ftopt.SyncSGD(), ftopt.PAFT(sync_every=1000)], ids=["sync_sgd", "paft"])
TOO_FEW = ftopt.FaultPolicy(start_replicas=1, min_replicas=2, grace_s=60.0, dead_after_s=60.0)
BOTH = ftopt.FaultPolicy(start_replicas=2, grace_s=60.0, dead_after_s=60.0, heartbeat_s=0.05)


class Replica:
    """One replica, whose loop sets the rate by the job's inner step."""

    def __init__(self, group: ftopt.ReplicaGroup, method: Method) -> None:
        with seeded():
            self.model = nn.Linear(3, 1, bias=False)
        self.group = group
        self.optimizer = ftopt.wrap(torch.optim.SGD(self.model.parameters(), lr=1.0), self.model, method, group=group)

    def step(self) -> None:
        """A turn of the loop."""
        self.set_rate()
        self.model.weight.grad = torch.ones(1, 3)
        self.optimizer.step()

    def sync(self) -> bool:
        self.set_rate()
        return self.optimizer.sync()

    def set_rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 1 / (1 + self.optimizer.inner_step)

    def step_to(self, version: int) -> None:
        """A turn of the loop that ends with ``version``."""
        self.step()
        ends = time.monotonic() + 30.0
        while self.optimizer.status.versions[0] < version:  # for a moment there may be too few replicas
            assert time.monotonic() < ends
            self.optimizer.sync(propose=False)
        self.optimizer.sync(propose=False)

    @property
    def weight(self) -> Tensor:
        return self.model.weight.detach().clone()


def behind_a_decision(method: Method, away: Callable[[Replica, threading.Event], None]) -> None:
    """Version 1 is decided without a word from the first replica's training thread; ``away`` goes on to version 2, and
    may wait for that decision."""
    late, other = [Replica(group, method) for group in ftopt.local_groups(2, policy=TOO_FEW)]
    proposed, decided, compared = threading.Event(), threading.Event(), threading.Barrier(2, timeout=30.0)

    def first() -> Tensor:
        with late.optimizer as optimizer:
            late.step()  # too few replicas: it is pending, and this replica trains on
            assert optimizer.pending_steps == 1
            proposed.set()
            away(late, decided)
            assert optimizer.status.versions[0] == 2
            compared.wait()
            return late.weight

    def second() -> Tensor:
        assert proposed.wait(30.0)
        with other.optimizer:
            other.step_to(1)
            decided.set()
            other.step_to(2)
            compared.wait()
            return other.weight

    ours, theirs = together([first, second])
    assert torch.equal(ours, theirs)


@METHODS
def test_a_replica_that_was_away_takes_two_agreed_gradients_in_two_steps(method: Method) -> None:
    def away(late: Replica, decided: threading.Event) -> None:
        assert decided.wait(30.0)
        while late.optimizer.inner_step < 2:
            late.step()

    behind_a_decision(method, away)


def test_a_gradient_that_is_agreed_on_while_a_step_looks_is_the_only_one_of_that_step() -> None:
    def away(late: Replica, decided: threading.Event) -> None:
        outstanding = late.group.outstanding

        def look(fragment: int) -> bool:
            assert decided.wait(30.0)
            return outstanding(fragment)

        late.group.outstanding = look  # type: ignore[method-assign]
        while late.optimizer.inner_step < 2:
            late.step()

    behind_a_decision(ftopt.SyncSGD(), away)


@METHODS
def test_sync_takes_no_two_agreed_gradients(method: Method) -> None:
    def away(late: Replica, decided: threading.Event) -> None:
        late.step()
        assert late.optimizer.pending_steps == 2
        assert decided.wait(30.0)
        assert not late.sync()
        assert late.optimizer.pending_steps == 1
        ends = time.monotonic() + 30.0
        while late.optimizer.status.versions[0] < 2:
            assert time.monotonic() < ends
            late.sync()
        late.optimizer.sync(propose=False)

    behind_a_decision(method, away)


@METHODS
def test_a_replica_that_has_fetched_takes_the_next_agreed_gradient_in_its_next_step(
    method: Method,
) -> None:
    """It is cut off while a version with a gradient of its own is decided, and comes back two versions later."""
    cut, ahead, back, compared = (*(threading.Event() for _ in range(3)), threading.Barrier(2, timeout=30.0))

    def on_event(event: Event) -> None:
        if event.event == "decide" and event.fragment == 0 and event.version == 2:
            groups[1].cut(600.0)  # type: ignore[attr-defined]

    groups = ftopt.local_groups(2, policy=BOTH, on_event=on_event)
    stays, cut_off = [Replica(group, method) for group in groups]

    def first() -> Tensor:
        with stays.optimizer as optimizer:
            stays.step()
            stays.step()
            assert cut.wait(30.0)
            while optimizer.inner_step < 4:
                stays.step()
            ahead.set()
            with optimizer._core.started().at_rest():  # else the other one could not fetch before the next step
                assert back.wait(30.0)
            while optimizer.inner_step < 8:
                stays.step()
            compared.wait()
            return stays.weight

    def second() -> Tensor:
        with cut_off.optimizer as optimizer:
            cut_off.step()
            cut_off.step()
            assert optimizer.inner_step == 1
            cut.set()
            assert ahead.wait(30.0)
            groups[1].cut(0.0)  # type: ignore[attr-defined]
            ends = time.monotonic() + 30.0
            while optimizer.status.versions[0] < 4 or groups[1].outstanding(0):
                assert time.monotonic() < ends
            assert optimizer.inner_step == 1
            assert optimizer.pending_steps == 0, "its own gradient is counted"
            back.set()
            while optimizer.inner_step < 8:
                cut_off.step()
            compared.wait()
            return cut_off.weight

    ours, theirs = together([first, second])
    assert torch.equal(ours, theirs)
