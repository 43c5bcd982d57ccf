"""A replica that joins takes each step as the others do, wherever the inner optimizer keeps its state."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.errors import UserError
from ftopt.methods import Method
from tests.optimizer.running import together

POLICY = ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, heartbeat_s=0.05, stragglers="wait")
KINDS = (
    "count in the group", "count among the defaults", "list in the group", "tensor in the group", "list in the state",
    "nested state", "python number", "numpy number", "key that is no parameter", "two-byte state", "complex state",
)  # fmt: skip


class Inner(torch.optim.Optimizer):
    """Momentum with Adam's correction of the bias, which counts wherever ``kind`` says."""

    def __init__(self, params: Any, lr: float, kind: str) -> None:
        super().__init__(params, {"lr": lr, **({"k": 0} if kind == "count among the defaults" else {})})
        self.kind = kind

    def _count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        match self.kind:
            case "count in the group":
                group["step"] = group.get("step", 0) + (state is next(self._states()))
                return float(group["step"])
            case "count among the defaults":
                group["k"] += state is next(self._states())
                return float(group["k"])
            case "list in the group":
                group.setdefault("buffer", [[0, None]])[0][0] += state is next(self._states())
                return float(group["buffer"][0][0])
            case "tensor in the group":
                group.setdefault("done", torch.zeros(())).add_(float(state is next(self._states())))
                return float(group["done"])
            case "nested state":
                state["inner"] = {"count": (state.get("inner", {"count": (0, "x")})["count"][0] + 1, "x")}
                return float(state["inner"]["count"][0])
            case "numpy number":
                state["n"] = state.get("n", np.float32(0.1)) * np.float32(1.1)
                return float(state["n"])
            case "key that is no parameter":
                held = self.state.setdefault("k", torch.zeros(1, dtype=torch.long))  # type: ignore[call-overload]
                held += state is next(self._states())
                return float(held)
        state["n"] = state.get("n", 0) + 1
        return float(state["n"])

    def _states(self) -> Iterator[dict[str, Any]]:
        return (self.state[p] for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                n = self._count(group, state)
                m = self._momentum(state, p)
                m.lerp_(p.grad.to(m.dtype), 0.02)
                p.sub_(m.real.float() / (1 - 0.98**n), alpha=group["lr"])

    def _momentum(self, state: dict[str, Any], p: Tensor) -> Tensor:
        if self.kind == "list in the state":
            found: Tensor = state.setdefault("m", [None, torch.zeros_like(p)])[1]
            return found
        dtype = {"two-byte state": torch.bfloat16, "complex state": torch.complex64}.get(self.kind, p.dtype)
        if "m" not in state:
            state["m"] = torch.zeros_like(p, dtype=dtype)
        made: Tensor = state["m"]
        return made


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "torch":
        return torch.optim.NAdam(model.parameters(), lr=0.01)
    return Inner(model.parameters(), 0.01, kind)


SYNC_SGD, PAFT = ftopt.SyncSGD(verify_every=5), ftopt.PAFT(sync_every=1000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "method"),
    [*zip(KINDS, itertools.cycle([SYNC_SGD, PAFT])), ("torch", SYNC_SGD), ("torch", PAFT)],
    ids=lambda value: getattr(value, "name", value),
)
def test_who_joins_takes_each_step_alike_wherever_the_inner_optimizer_counts(kind: str, method: Method) -> None:
    events: list[Any] = []
    groups = ftopt.local_groups(2, policy=POLICY, on_event=events.append)
    under_way, enough = threading.Event(), threading.Event()

    def replica(m: int) -> dict[int, Tensor]:
        torch_model = nn.Linear(4, 3)
        with torch.no_grad():
            for p in torch_model.parameters():
                p.fill_(0.1)
        optimizer = ftopt.wrap(optimizer_of(kind, torch_model), torch_model, method, group=groups[m])
        chance, seen = torch.Generator().manual_seed(m), dict[int, Tensor]()
        if m == 1:
            assert under_way.wait(60.0)
        with optimizer:
            while optimizer.inner_step < 400 and not enough.is_set():
                torch_model(torch.randn(8, 4, generator=chance)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen[optimizer.inner_step] = nn.utils.parameters_to_vector(torch_model.parameters()).detach().clone()
                if optimizer.inner_step == 7:
                    under_way.set()
                if m == 1 and len(seen) == 8:
                    enough.set()
        return seen

    first, second = together([partial(replica, m) for m in range(2)])
    both = first.keys() & second.keys()
    assert len(both) >= 6
    assert [step for step in sorted(both) if not torch.equal(first[step], second[step])] == []
    assert not [event for event in events if event.event == "diverged"]


class Opaque(Inner):
    def _count(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        state["of_my_own"] = self
        return super()._count(group, state)


def test_state_that_no_joiner_can_be_given_is_refused_with_the_first_step() -> None:
    model = nn.Linear(4, 3)
    optimizer = ftopt.wrap(
        Opaque(model.parameters(), 0.01, "python number"), model, ftopt.SyncSGD(), group=ftopt.solo()
    )
    model(torch.ones(2, 4)).sum().backward()
    with (
        optimizer,
        pytest.raises(UserError, match=r"the state of Opaque: inner.bias/of_my_own is a .*Opaq"),
    ):
        for _ in range(3):
            optimizer.step()
            optimizer.sync(propose=False)


def test_what_a_schedule_sets_stays_each_replicas_own() -> None:
    """A schedule that begins at a joiner's own rate must not begin at a rate of the others'."""
    groups = ftopt.local_groups(2, policy=POLICY)
    under_way, enough = threading.Event(), threading.Event()

    def replica(m: int) -> float:
        model = nn.Linear(4, 3)
        inner = Inner(model.parameters(), 0.01, "count among the defaults")
        optimizer = ftopt.wrap(inner, model, ftopt.SyncSGD(), group=groups[m])
        if m == 1:
            assert under_way.wait(60.0)
        with optimizer:
            if m == 1:
                assert inner.param_groups[0]["k"] >= 5
                found = float(inner.param_groups[0]["lr"])
                enough.set()
                return found
            while not enough.is_set():
                inner.param_groups[0]["lr"] = 0.005
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if optimizer.inner_step == 5:
                    under_way.set()
        return 0.0

    assert together([partial(replica, m) for m in range(2)])[1] == 0.01
