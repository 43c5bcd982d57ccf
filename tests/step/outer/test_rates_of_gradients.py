"""Replicas that take every step alike take it at the same rate, whatever each of them has pending."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.codecs import FP32
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.step.inner import Inner
from ftopt.step.outer.step import OuterStep
from ftopt.sync.group import Committed
from tests.optimizer.running import PATIENT, together
from tests.problems import seeded

POLICY = ftopt.FaultPolicy(grace_s=0.1, dead_after_s=60.0, heartbeat_s=0.05)


@pytest.mark.parametrize("method", [ftopt.SyncSGD(verify_every=1), ftopt.PAFT(sync_every=1000)])
def test_gradients_that_wait_do_not_move_a_schedule_ahead(method: Method) -> None:
    """One replica is cut off, and comes back with gradients of several passes."""
    events: list[Event] = []
    apart, returned, back = threading.Event(), threading.Event(), threading.Event()

    def on_event(event: Event) -> None:
        events.append(event)
        if event.event == "return" and event.replica == "r1":
            returned.set()

    groups = ftopt.local_groups(2, policy=POLICY, on_event=on_event)
    models = [nn.Linear(4, 2) for _ in groups]
    carried, ends, barrier = list[int](), list[int](), threading.Barrier(2, timeout=60.0)

    def replica(m: int) -> Tensor:
        model, group = models[m], groups[m]
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=group)
        chance = torch.Generator().manual_seed(m)
        with optimizer:
            while optimizer.status.versions[0] < 30:
                if m == 1 and optimizer.status.versions[0] >= 5 and not (apart.is_set() or optimizer.pending_steps):
                    group.cut(600.0)  # type: ignore[attr-defined]
                    apart.set()
                if m == 0 and optimizer.status.versions[0] >= 10:  # the other one may have missed rounds
                    assert apart.wait(60.0)
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + optimizer.inner_step)
                optimizer.zero_grad()
                model(torch.randn(8, 4, generator=chance)).square().mean().backward()
                optimizer.step()
                if m == 1 and apart.is_set() and not back.is_set():
                    carried.append(optimizer.pending_steps)
                    if len(carried) == 3:
                        group.cut(0.0)  # type: ignore[attr-defined]
                        assert returned.wait(60.0)
                        back.set()
                elif apart.is_set():
                    assert back.wait(60.0)
            ends.append(optimizer.status.versions[0])
            with optimizer.busy("done"):
                barrier.wait()
            while optimizer.status.versions[0] < max(ends):  # one may have had a round to make up
                optimizer.sync(propose=False)
            optimizer.sync(propose=False)
            barrier.wait()
            return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    first, second = together([lambda m=m: replica(m) for m in range(2)])
    assert carried == [1, 2, 3], "it had something pending"
    assert [event for event in events if event.event == "diverged"] == []
    assert torch.equal(first, second)


class Silent:
    replica = "r0"
    policy = ftopt.FaultPolicy()
    codec = FP32()
    units = None
    global_batch = None

    def emit(self, event: str, **fields: object) -> None:
        """Listens."""


def one(lr: float) -> tuple[nn.Module, Inner, OuterStep]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inner = Inner([torch.optim.SGD(model.parameters(), lr=lr)])
    return model, inner, OuterStep([], ftopt.SyncSGD(), Silent(), (inner, model))  # type: ignore[arg-type]


def test_a_gradient_that_comes_with_a_fetched_model_is_applied_at_its_sources_rate() -> None:
    """A newcomer's schedule has not begun when it takes the step that its source is about to take."""
    (theirs, _, source), (ours, inner, newcomer) = one(0.5), one(7.0)
    assert source.gradients is not None
    agreed = {"gradient": torch.ones(15), "present": torch.ones(2)}
    live = source.gradients.live
    with live.at_rest(), live.lock:
        served = live.serve(agreed)
    assert served is not None
    digest, tensors = served
    newcomer.reduction.install(Committed(0, 7, 7, 0), digest, tensors, reset=False)
    newcomer.apply()
    expected = nn.utils.parameters_to_vector(theirs.parameters()) - 0.5
    torch.testing.assert_close(nn.utils.parameters_to_vector(ours.parameters()), expected)
    assert inner.param_groups[0]["lr"] == 7.0


@pytest.mark.parametrize("delay", [0, 1])
def test_gradients_that_no_round_counts_do_not_move_averages_ahead(delay: int) -> None:
    """One replica counts no tokens, so that nothing of it weighs anything; the others average when they are due."""
    events: list[Event] = []
    groups = ftopt.local_groups(3, policy=PATIENT, on_event=events.append)
    barrier = threading.Barrier(3, timeout=60.0)
    method = ftopt.PAFT(sync_every=2, delay=delay, weights="tokens")

    def replica(m: int) -> tuple[int, ...]:
        with seeded():
            model = nn.Linear(4, 2)
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=groups[m])
        with optimizer:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.ones(1, 4)).square().sum().backward()
                optimizer.log(tokens=8 if m else 0)
                optimizer.step()
            barrier.wait()
            versions = optimizer.status.versions
            barrier.wait()
            return versions

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps without tokens
        assert [versions[0] for versions in together([lambda m=m: replica(m) for m in range(3)])] == [6, 6, 6]
    averages = [e for e in events if e.event == "decide" and e.fragment == 1]
    assert [e.data["inner_step"] for e in averages[:2]] == [2, 4]
    assert [[member[4] for member in e.data["members"]] for e in averages[:2]] == [[0, 16, 16]] * 2
