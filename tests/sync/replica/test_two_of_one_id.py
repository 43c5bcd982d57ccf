"""Two replicas of one id through the public surface: one trains, the other one is told why it cannot."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import FtoptError
from ftopt.events import Event

POLICY = ftopt.FaultPolicy(start_replicas=2, dead_after_s=4.0, heartbeat_s=0.1, start_s=30.0)
"""The second one is refused when the first one has been heard for ``dead_after_s`` beside it."""


@pytest.mark.long
def test_before_the_job_starts_the_second_one_waits_and_then_is_refused() -> None:
    events: list[Event] = []
    waits, trained = threading.Event(), threading.Semaphore(0)

    def on_event(event: Event) -> None:
        events.append(event)
        if event.event == "hold" and "is connected as a" in str(event.data["text"]):
            waits.set()

    groups = ftopt.local_groups(3, names=["a", "a", "b"], policy=POLICY, on_event=on_event)
    ends: dict[int, BaseException | None] = {}
    refused = threading.Event()

    def train(number: int) -> None:
        model = nn.Linear(2, 1)
        optimizer = ftopt.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=2), group=groups[number]
        )
        try:
            with optimizer:
                while not refused.wait(0.01):
                    model(torch.ones(2)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            ends[number] = None
        except FtoptError as error:
            ends[number] = error
            refused.set()
        trained.release()

    threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(3)]
    for thread in threads[:2]:
        thread.start()
    assert waits.wait(30)
    threads[2].start()
    for _ in threads:
        assert trained.acquire(timeout=60)
    [error] = [error for error in ends.values() if error is not None]
    assert "replica ids must be unique in a job" in str(error)
    assert "close() the optimizer that has joined there" in str(error), "it is of the same process"
    assert ends[2] is None, "the other replica trains"
    assert len([x for x in events if x.event == "join"]) == 2
    assert len([x for x in events if x.event == "disconnected"]) <= 1, "nobody is thrown out time and again"
