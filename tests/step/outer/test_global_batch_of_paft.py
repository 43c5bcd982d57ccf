"""PAFT with a global batch: gradients of the full batch in every step, parameters averaged now and then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt._connect import local_groups
from ftopt.events import Event
from ftopt.sync.group import ReplicaGroup, Samples
from tests.optimizer.running import together
from tests.step.outer.test_global_batch import FAST, Points, inner, model, plain, same

SAMPLES = Samples(samples=60, batch_size=4, global_batch=12, epochs=2)
"""Ten batches of three units."""


def train(group: ReplicaGroup, method: Any, *, drift: float = 0.0, dies_at: int | None = None) -> nn.Module | None:
    module = model()
    optimizer = ftopt.wrap(inner(module), module, method, group=group)
    loader = ftopt.DataLoader(Points(60), 4, group=group, epochs=2, global_batch=12)
    with optimizer:
        for step, micro_batches in enumerate(loader.global_batches(), 1):
            for x, y in micro_batches:
                nn.functional.mse_loss(module(x), y).backward()
                if step == dies_at:
                    group.close()
                    optimizer.close(flush=False)  # the dead hand nothing in
                    return None
            optimizer.step()
            if drift and step == 3:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.add_(drift)
    return module


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_steps_are_those_of_the_full_batch_and_parameters_are_averaged(delay: int, replicas: int) -> None:
    events: list[Event] = []
    groups = local_groups(replicas, policy=FAST, on_event=events.append)
    method = ftopt.PAFT(sync_every=4, delay=delay)
    for ours in together([lambda group=group: train(group, method) for group in groups]):
        same(ours, plain(SAMPLES))
    decided = [(e.fragment, e.version) for e in events if e.event == "decide"]
    assert [version for fragment, version in decided if fragment == 0] == list(range(1, 11))
    assert [version for fragment, version in decided if fragment == 1][:2] == [1, 2]
    assert not [e for e in events if e.event == "fetched"]


@pytest.mark.long
@pytest.mark.parametrize(("dies_at", "delay"), [(3, 0), (4, 0), (4, 1), (5, 1)])
def test_one_that_dies_costs_its_micro_batches_alone(delay: int, dies_at: int) -> None:
    events: list[Event] = []
    groups = local_groups(3, policy=FAST, on_event=events.append)
    method = ftopt.PAFT(sync_every=4, delay=delay)
    found = together([lambda i=i: train(groups[i], method, dies_at=dies_at if i == 2 else None) for i in range(3)])
    for ours in found[:2]:
        assert ours is not None
        same(ours, plain(SAMPLES))
    parts = [part for e in events if e.event == "micro_batch" for part in e.data["units"]]
    computed = sorted(unit for start, stop in parts for unit in range(start, stop))
    assert computed == list(range(30)), "the dead one's was not at its end, and is computed once"


def test_replicas_that_have_drifted_apart_are_averaged() -> None:
    groups = local_groups(2, policy=FAST)
    method = ftopt.PAFT(sync_every=4)
    a, b = together([lambda i=i: train(groups[i], method, drift=0.01 * i) for i in range(2)])
    assert a is not None and b is not None
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
