"""Replicas that take every step alike are compared; one that differs takes over what the others have."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt._connect import local_groups
from ftopt.errors import UserError
from ftopt.events import Event
from tests.optimizer.running import together
from tests.problems import problem

EVERY = 5
POLICY = ftopt.FaultPolicy(grace_s=4.0, dead_after_s=60.0)

Interfere = Callable[[int, int, nn.Module, torch.optim.Optimizer], None]
"""(replica, steps taken, model, inner optimizer): between two steps."""


def flip(tensor: Tensor, bit: int) -> None:
    """Flips one bit of the first element."""
    with torch.no_grad():
        bits = tensor.detach().view(-1)[:1].view(torch.int32)
        bits ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)


def run(
    interfere: Interfere, *, replicas: int = 3, steps: int = 12, inner: str = "adamw", **settings: Any
) -> tuple[list[list[Tensor]], list[Event]]:
    """Trains with `SyncSGD`; returns each replica's parameters and inner state, and the events."""
    task, events, lock = problem("mlp", inner), list[Event](), threading.Lock()
    method = ftopt.SyncSGD(**{"verify_every": EVERY, **settings})

    def on_event(event: Event) -> None:
        with lock:
            events.append(event)

    groups = local_groups(replicas, policy=POLICY, on_event=on_event)
    versions = dict[int, int]()

    def replica(m: int) -> list[Tensor]:
        model = task.model(0)
        optimizer = task.inner(model.parameters())
        outer = ftopt.wrap(optimizer, model, method, group=groups[m])
        with outer:
            for step in range(steps):
                interfere(m, step, model, optimizer)
                outer.zero_grad()
                task.backward(model, m, step)
                outer.step()
            outer.sync(propose=False)
            versions[m] = outer.status.versions[0]
            ends_s = time.monotonic() + 60
            while len(versions) < replicas or len(set(versions.values())) > 1:
                assert time.monotonic() < ends_s, versions
                time.sleep(0.01)
                outer.sync(propose=False)  # a replica gives its state away within a call only
                versions[m] = outer.status.versions[0]
            state = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, Tensor)]
            return [t.detach().clone() for t in (*model.parameters(), *state)]

    return together([lambda m=m: replica(m) for m in range(replicas)]), events


def named(events: list[Event], event: str) -> list[Event]:
    return [e for e in events if e.event == event]


def assert_alike(held: list[list[Tensor]]) -> None:
    for other in held[1:]:
        assert all(torch.equal(a, b) for a, b in zip(held[0], other, strict=True))


def clean(m: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing goes wrong."""


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_that_are_alike_are_left_alone(replicas: int) -> None:
    held, events = run(clean, replicas=replicas)
    assert_alike(held)
    assert not [e for e in events if e.event in ("diverged", "equalized", "unlike", "mismatch")]


@pytest.mark.parametrize("bit", [0, 13, 22, 26, 30, 31])
def test_a_flipped_bit_of_a_parameter_is_found_and_its_holder_healed_and_named(bit: int) -> None:
    def interfere(m: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if (m, step) == (1, 6):
            flip(next(model.parameters()), bit)

    held, events = run(interfere)
    (told,) = named(events, "diverged")
    assert (told.replica, told.version) == ("r1", 10)
    assert "r0, r2" in told.data["reason"]
    assert [e.replica for e in named(events, "hold") if e.data["text"] == told.data["reason"]] == ["r1"]
    assert_alike(held)
    assert all(bool(torch.isfinite(t).all()) for t in held[0])


@pytest.mark.parametrize("what", ["exp_avg", "exp_avg_sq", "momentum_buffer"])
def test_a_flipped_bit_of_the_inner_state_is_healed_too(what: str) -> None:
    def interfere(m: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if (m, step) == (0, 6):
            flip(optimizer.state[next(model.parameters())][what], 21)

    held, events = run(interfere, inner="sgd" if what == "momentum_buffer" else "adamw")
    assert [e.replica for e in named(events, "diverged")] == ["r0"]
    assert_alike(held)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("bit", [30, 29])
def test_of_two_the_one_with_the_larger_values_takes_over_the_others(victim: int, bit: int) -> None:
    def interfere(m: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if (m, step) == (victim, 6):
            tensor = next(model.parameters())
            if bit == 30:
                flip(tensor, bit)
            else:
                with torch.no_grad():
                    tensor.view(-1)[0] = math.nan

    held, events = run(interfere, replicas=2)
    (told,) = named(events, "diverged")
    assert told.replica == f"r{victim}"
    assert_alike(held)
    assert all(bool((t.abs() < 1e3).all()) for t in held[0])


def test_a_model_that_became_non_finite_ends_healed() -> None:
    def interfere(m: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if (m, step) == (2, 6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(math.nan)

    held, events = run(interfere, steps=14)
    assert [e.replica for e in named(events, "diverged")] == ["r2"]
    assert_alike(held)
    assert all(bool(torch.isfinite(t).all()) for t in held[0])
    rounds = [e for e in named(events, "decide") if e.version is not None and e.version > 11]
    assert all(row[5] for e in rounds for row in e.data["members"]), "its gradients are finite again"


def test_what_does_not_train_may_be_of_any_dtype() -> None:
    """Quantized weights come first in the model."""
    model = nn.Module()
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    model.head = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.head.parameters(), lr=0.5)
    with ftopt.wrap(inner, model, ftopt.SyncSGD(), group=ftopt.solo()) as outer:
        model.head(torch.ones(1, 3)).sum().backward()
        outer.step()
        assert outer.inner_step == 1


def test_nothing_is_compared_when_it_is_off() -> None:
    def interfere(m: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if (m, step) == (1, 6):
            flip(next(model.parameters()), 22)

    held, events = run(interfere, verify_every=None)
    assert not named(events, "diverged")
    assert not torch.equal(held[0][0], held[1][0])


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "50"])
def test_how_often_is_a_whole_number(every: object) -> None:
    with pytest.raises(UserError, match=r"verify_every=.* at least 1; 50 is usual"):
        ftopt.SyncSGD(verify_every=every)  # type: ignore[arg-type]
