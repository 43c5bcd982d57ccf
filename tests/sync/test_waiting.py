"""Between the training thread and the network thread: whoever waits for an outer step waits until it is decided."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ftopt.connect import local_groups
from ftopt.events import Event
from ftopt.methods import LocalSGD
from ftopt.optimizer import wrap
from ftopt.sync.client import Client
from tests.optimizer.running import PATIENT, together
from tests.problems import problem

H, ROUNDS = 5, 3


def test_a_proposal_that_the_network_thread_is_busy_with_is_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has it, the message is not sent yet. A busy machine stretches that moment; here a sleep does."""
    perform = Client._perform

    def slowly(client: Client, effect: Any) -> None:
        time.sleep(0.01)
        perform(client, effect)

    monkeypatch.setattr(Client, "_perform", slowly)
    task, steps = problem("mlp", "sgd"), list[Any]()

    def on_event(event: Event) -> None:
        if event.event == "quorum":
            steps.append(event.data["steps"])

    groups = local_groups(2, sync=PATIENT, on_event=on_event)

    def replica(m: int) -> None:
        model = task.model(0)
        optimizer = wrap(task.inner(model.parameters()), model, LocalSGD(sync_every=H), group=groups[m])
        with optimizer:
            for step in range(H * ROUNDS):
                optimizer.zero_grad()
                task.backward(model, m, step)
                optimizer.step()

    together([lambda m=m: replica(m) for m in range(2)])  # type: ignore[misc]
    assert steps == [[H, H]] * ROUNDS
