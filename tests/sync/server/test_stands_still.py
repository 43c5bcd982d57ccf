"""A coordinator whose process stands still for a while: it has heard nobody meanwhile, and nobody is to blame."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn

import ftopt
from ftopt.events import Event
from tests.optimizer.running import together

SYNC = ftopt.Sync(start_replicas=2, dead_after_s=0.9, grace_s=60.0)


def test_who_is_heard_late_since_the_coordinator_stood_still_is_not_cut_off() -> None:
    events: list[Event] = []
    groups = ftopt.local_groups(2, sync=SYNC, on_event=events.append)
    begun = threading.Barrier(2)

    def train(group: Any) -> tuple[int, int, int]:
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(0.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=2), group=group) as optimizer:
            begun.wait(60.0)
            for number in range(6):
                if number in (1, 4) and group is groups[0]:
                    group.session.network.soon(time.sleep, 2.0)
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
            return optimizer.committed.version, optimizer.committed.inner_step, optimizer.pending_steps

    assert together([lambda: train(groups[0]), lambda: train(groups[1])]) == [(3, 6, 0)] * 2
    assert not [x for x in events if x.event in ("lost", "disconnected", "return")]


def test_who_is_gone_is_noticed_all_the_same() -> None:
    """It stands still over and over, and one replica says nothing at all."""
    events: list[Event] = []
    groups = ftopt.local_groups(2, sync=ftopt.Sync(start_replicas=2, dead_after_s=0.9), on_event=events.append)
    lost = threading.Event()
    begun = threading.Barrier(2)

    def joins(group: Any) -> None:
        model = nn.Linear(2, 1)
        with ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.LocalSGD(sync_every=1), group=group):
            begun.wait(60.0)
            if group is groups[0]:
                session = groups[1].session  # type: ignore[attr-defined]
                session.network.soon(lambda: [task.cancel() for task in session._tasks[1:]])  # its heartbeats end
            deadline = time.monotonic() + 100.0
            while not any(x.event == "lost" for x in events) and time.monotonic() < deadline:
                if group is groups[0]:
                    group.session.network.soon(time.sleep, 0.5)
                lost.wait(0.6)

    together([lambda: joins(groups[0]), lambda: joins(groups[1])])
    assert [x.replica for x in events if x.event == "lost"][:1] == ["r1"]
