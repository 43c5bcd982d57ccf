"""Weights that user code has in the model for a while reach no peer, and are not compared with theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.sync.group import Busy, Committed
from tests.optimizer.running import together
from tests.problems import seeded
from tests.step.outer.test_live_state import one

POLICY = ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, heartbeat_s=0.05, stragglers="wait")
TOO_FEW = ftopt.FaultPolicy(start_replicas=1, min_replicas=2, grace_s=60.0, dead_after_s=60.0)
METHODS = {"SyncSGD": ftopt.SyncSGD(verify_every=2), "PAFT": ftopt.PAFT(sync_every=4)}
LIMIT_S = 30.0


def copied(parameter: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


def copied_past_autograd(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.data.copy_(values)


def replaced(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.data = values.clone()


Put = Callable[[nn.Parameter, Tensor], None]
PUTS = [copied, copied_past_autograd, replaced]


class Looked:
    """A model in which its user looks at other weights: 9s."""

    def __init__(self, put: Put = copied_past_autograd) -> None:
        with seeded():
            self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        self._put, self._own = put, list[Tensor]()

    def look(self) -> None:
        self._own = [p.detach().clone() for p in self.model.parameters()]
        self._fill([torch.full_like(own, 9.0) for own in self._own])

    def put_back(self) -> None:
        self._fill(self._own)

    def _fill(self, values: Sequence[Tensor]) -> None:
        for parameter, each in zip(self.model.parameters(), values, strict=True):
            self._put(parameter, each)

    @property
    def values(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


def step(model: nn.Module, optimizer: ftopt.ReplicaOptimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_joiner_gets_the_replicas_own_weights_while_its_user_looks_at_others(
    method: Method, steps: int, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftopt.sync.replica.fetcher._BUSY_S", 0.02, raising=False)
    looking, answered, enough = threading.Event(), threading.Event(), threading.Event()
    events = list[Event]()

    def on_event(event: Event) -> None:
        events.append(event)
        if event.replica == groups[1].replica and event.fragment == 0 and event.event in ("fetched", "fetch_failed"):
            answered.set()

    groups = ftopt.local_groups(2, policy=POLICY, on_event=on_event)
    seen: list[dict[int, Tensor]] = [{}, {}]

    def replica(m: int) -> None:
        looked = Looked(put)
        if m == 1:
            assert looking.wait(LIMIT_S)
            nn.init.zeros_(looked.model[0].weight)  # type: ignore[arg-type]
        inner = torch.optim.SGD(looked.model.parameters(), lr=0.01, momentum=0.9)
        with ftopt.wrap(inner, looked.model, method, group=groups[m]) as optimizer:
            while not enough.is_set():
                if m == 0 and optimizer.inner_step == steps and not looking.is_set():
                    looked.look()
                    looking.set()
                    assert answered.wait(LIMIT_S)
                    looked.put_back()
                seen[m][optimizer.inner_step] = looked.values
                step(looked.model, optimizer)
                if m == 1 and len(seen[1]) == 6:
                    enough.set()

    together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]
    both = seen[0].keys() & seen[1].keys()
    assert len(both) >= 4
    assert [n for n in sorted(both) if not torch.equal(seen[0][n], seen[1][n])] == []
    assert not [event for event in events if event.event == "diverged"]


def test_a_verification_sees_no_weights_that_a_user_looks_at() -> None:
    """The first replica's step does not wait for long, since it is alone, or the other one has no step to offer; the
    round is held while its user looks."""
    events = list[Event]()
    groups = ftopt.local_groups(2, policy=replace(TOO_FEW, grace_s=0.5), on_event=events.append)
    looking, decided, compared = threading.Event(), threading.Event(), threading.Barrier(2, timeout=LIMIT_S)

    def replica(m: int) -> Tensor:
        looked = Looked()
        inner = torch.optim.SGD(looked.model.parameters(), lr=0.01)
        optimizer = ftopt.wrap(inner, looked.model, ftopt.SyncSGD(verify_every=1), group=groups[m])
        with optimizer:
            if m == 0:
                step(looked.model, optimizer)
                assert optimizer.pending_steps == 1
            compared.wait()
            if m == 0:
                looked.look()
                looking.set()
                assert decided.wait(LIMIT_S)
                looked.put_back()
                optimizer.sync(propose=False)
            else:
                assert looking.wait(LIMIT_S)
                while not optimizer.status.versions[0]:
                    step(looked.model, optimizer)
                    optimizer.sync(propose=False)
                decided.set()
            compared.wait()
            return looked.values

    first, second = together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]
    assert not [event for event in events if event.event == "diverged"]
    assert torch.equal(first, second)


def test_a_call_of_the_optimizer_waits_for_a_peer_that_waits_for_it() -> None:
    """Else a replica that trains alone, whose rounds are over at once, could be asked in vain for ever."""
    _, outer = one(1)
    assert outer.gradients is not None
    outer.gradients._begun = outer.gradients._begun[0], ""
    with pytest.raises(Busy):
        outer.reduction.state(0)
    waits, got = threading.Event(), list[dict[str, Tensor]]()

    def peer() -> None:
        with outer.reduction.awaited(0):
            waits.set()
            while not got:
                try:
                    got.append(outer.reduction.state(0)[1])
                except Busy:
                    continue

    thread = threading.Thread(target=peer)
    thread.start()
    assert waits.wait(LIMIT_S)
    with outer.at_rest():
        assert got
    thread.join()


def test_a_cold_start_from_what_a_replica_holds_does_not_read_its_model() -> None:
    model, outer = one(1)
    outer.fragments[0].start_at(Committed(0, 0, 0, 0))
    own = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data.fill_(9.0)
    outer.reduction.begin(Committed(0, 5, 5, 0), reset=True)
    for parameter, each in zip(model.parameters(), own, strict=True):
        parameter.data.copy_(each)
    outer.apply()
    assert outer.fragments[0].applied.meta.version == 5
    assert all(torch.equal(p, each) for p, each in zip(model.parameters(), own, strict=True))
