"""Between the training thread and the network thread: a wait for an outer step lasts until it is decided."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ftopt._connect import local_groups
from ftopt.events import Event
from ftopt.fragments import Strided
from ftopt.methods import LocalSGD, Method, StreamingDiLoCo
from ftopt.optimizer import wrap
from ftopt.step.tensors.flat import parameters
from ftopt.sync.replica.session import Session
from tests.optimizer.running import PATIENT, together
from tests.problems import problem

H, ROUNDS = 5, 3


def test_a_proposal_that_the_network_thread_is_busy_with_is_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has it, the message is not sent yet. A busy machine stretches that moment; here a sleep does."""
    perform = Session._perform

    def slowly(session: Session, effect: Any) -> None:
        time.sleep(0.01)
        perform(session, effect)

    monkeypatch.setattr(Session, "_perform", slowly)
    assert _contributions(2, LocalSGD(sync_every=H), H * ROUNDS) == [[H, H]] * ROUNDS


@pytest.mark.parametrize(
    "method", [LocalSGD(sync_every=H), StreamingDiLoCo(sync_every=H, fragments=Strided(n=2), delay=0)]
)
def test_all_that_is_pending_when_a_job_ends_is_in_its_last_outer_step(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else who takes half a second from saying that it leaves to handing in is left to a round of its own.
    monkeypatch.setattr("ftopt.sync.protocol.coordinator.rounds.waiting.PATIENCE_S", 60.0)
    fragments = len(method.partition(parameters(problem("mlp", "sgd").model(0))))
    found = _contributions(3, method, H + 2)
    assert all(len(steps) == 3 for steps in found)
    assert sum(map(sum, found)) == 3 * fragments * (H + 2)


def _contributions(replicas: int, method: Method, steps: int) -> list[list[int]]:
    """Trains; returns what the members of each quorum brought."""
    task, found = problem("mlp", "sgd"), list[list[int]]()
    models = [task.model(0) for _ in range(replicas)]  # not in the threads: the global seed is the process'

    def on_event(event: Event) -> None:
        if event.event == "quorum":
            found.append(event.data["steps"])

    groups = local_groups(replicas, policy=PATIENT, on_event=on_event)

    def replica(m: int) -> None:
        model = models[m]
        optimizer = wrap(task.inner(model.parameters()), model, method, group=groups[m])
        with optimizer:
            for step in range(steps):
                optimizer.zero_grad()
                task.backward(model, m, step)
                optimizer.step()

    together([lambda m=m: replica(m) for m in range(replicas)])  # type: ignore[misc]
    return found
