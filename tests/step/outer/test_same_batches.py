"""Replicas that all train on the same batches are told so."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import ftopt
from ftopt.events import Event
from ftopt.methods import Method
from tests.optimizer.running import PATIENT, together

SAID = "r0, r1 have contributed the same to each of the versions"


@pytest.mark.parametrize("method", [ftopt.DiLoCo(sync_every=2), ftopt.SyncSGD(), ftopt.PAFT(sync_every=2)])
@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_replicas_with_one_seed_hear_that_their_batches_are_the_same(method: Method, seeds: tuple[int, int]) -> None:
    events: list[Event] = []
    groups = ftopt.local_groups(2, policy=PATIENT, on_event=events.append)

    def replica(m: int) -> None:
        model, chance = nn.Linear(4, 2), torch.Generator().manual_seed(seeds[m])
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=groups[m])
        with optimizer:
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.randn(8, 4, generator=chance)).square().mean().backward()
                optimizer.step()

    together([partial(replica, m) for m in range(2)])
    said = [event.replica for event in events if event.event == "hold" and SAID in event.data["text"]]
    assert set(said) == ({"r0", "r1"} if seeds[0] == seeds[1] else set())
    assert len(said) <= 2, "each replica once"
