"""What a replica serves while the model in its hands is not of the version that it holds."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt.codecs import FP32
from ftopt.step.inner import Inner
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.gradient_fragment import GradientFragment
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import Busy, Committed


class Silent:
    replica = "r0"
    policy = ftopt.FaultPolicy()
    codec = FP32()
    units = None
    global_batch = None

    def emit(self, event: str, **fields: Any) -> None:
        """Listens."""


def one(seed: int) -> tuple[nn.Module, OuterStep]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    inner = Inner([torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
    return model, OuterStep([], ftopt.SyncSGD(), Silent(), (inner, model))  # type: ignore[arg-type]


def test_a_fetched_model_is_served_as_it_came_until_it_is_applied() -> None:
    source, newcomer = one(1)[1], one(2)
    digest, tensors = source.reduction.state(0)
    newcomer[1].reduction.install(Committed(0, 7, 7, 0), digest, tensors, reset=False)
    served, copies = newcomer[1].reduction.state(0)
    assert served == digest
    assert copies.keys() == tensors.keys()
    assert all(torch.equal(copies[name], tensors[name]) for name in tensors)
    newcomer[1].apply()
    with newcomer[1].at_rest():
        assert newcomer[1].reduction.state(0)[0] == digest


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_newcomer_takes_the_step_that_is_not_applied_yet_at_the_rates_of_its_source(kind: str) -> None:
    """Its own schedule has not begun."""

    def replica(seed: int, **settings: Any) -> tuple[nn.Module, GradientFragment]:
        torch.manual_seed(seed)
        model, cls = nn.Linear(4, 3), torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
        inner = Inner([cls(model.parameters(), **settings)])
        outer = OuterStep([], ftopt.SyncSGD(), Silent(), (inner, model))  # type: ignore[arg-type]
        assert outer.gradients is not None
        return model, outer.gradients

    moved = {"lr": 0.1, "momentum": 0.5} if kind == "sgd" else {"lr": 0.1, "betas": (0.5, 0.9)}
    source, newcomer = replica(1, **moved), replica(2, lr=0.001)
    state = source[1].state
    outer = {name: torch.ones_like(t) if name in ("gradient", "present") else t for name, t in state.outer.items()}
    source[1].state = replace(state, outer=outer, meta=Committed(0, 1, 1, 0))
    digest, tensors = source[1].serve()
    newcomer[1].install(newcomer[1].check(Committed(0, 1, 1, 0), digest, tensors, Memory()), reset=False)
    for _, fragment in (source, newcomer):
        fragment.follow(fragment.state)
    for a, b in zip(source[0].parameters(), newcomer[0].parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
    assert newcomer[1]._inner.param_groups[0]["lr"] == 0.001


def test_the_initial_model_is_served_alike_before_and_after_the_start() -> None:
    """Nothing is left to be applied: who fetches it must not take a step with a gradient of zeros."""
    outer = one(1)[1]
    before, _ = outer.reduction.state(0)
    outer.fragments[0].start_at(Committed(0, 0, 0, 0))
    served, tensors = outer.reduction.state(0)
    assert served == before and "gradient" not in tensors


def test_a_peer_that_fetches_the_initial_model_early_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take a step with it that nobody else takes."""
    start_at, served, peers = Fragment.start_at, list[dict[str, Tensor]](), list[threading.Thread]()

    def served_in_between(self: Fragment, meta: Committed) -> None:
        start_at(self, meta)
        peer = threading.Thread(target=asks, args=(self,))
        peer.start()
        peer.join(0.1)
        peers.append(peer)

    def asks(fragment: Fragment) -> None:
        while not served:
            with contextlib.suppress(Busy):
                served.append(fragment.serve()[1])

    monkeypatch.setattr(Fragment, "start_at", served_in_between)
    (fragment,) = one(1)[1].fragments
    fragment.start_at(Committed(0, 0, 0, 0))
    peers[0].join()
    assert [set(tensors) for tensors in served] == [{"params", "usual"}]
