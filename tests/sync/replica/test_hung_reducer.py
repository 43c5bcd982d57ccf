"""A reducer thread that hangs in a job of real clients and a real coordinator, in one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ftopt._connect import local_groups
from ftopt.events import Event
from ftopt.methods import LocalSGD
from ftopt.optimizer import wrap
from ftopt.sync.protocol.policy import FaultPolicy
from tests.optimizer.running import together
from tests.problems import problem

LIMIT_S = 30.0


class Decisions:
    """Which replicas were members of each decision."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._members: list[list[str]] = []

    def on_event(self, event: Event) -> None:
        if event.event == "decide":
            with self._changed:
                self._members.append([member[0] for member in event.data["members"]])
                self._changed.notify_all()

    def wait(self, names: list[str], count: int) -> None:
        """Until so many more decisions with just these members."""
        with self._changed:
            start = len(self._members)
            done = self._changed.wait_for(lambda: self._members[start:].count(names) >= count, LIMIT_S)
            assert done, f"no {count} decisions of {names} within {LIMIT_S:g} s: {self._members[start:]}"


def test_a_reducer_thread_that_hangs_is_left_out_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions, done, hangs, free = Decisions(), threading.Event(), threading.Event(), threading.Event()
    policy = FaultPolicy(grace_s=0.3, heartbeat_s=0.2, dead_after_s=1.0)
    groups = local_groups(3, policy=policy, on_event=decisions.on_event)
    session = groups[2].session  # type: ignore[attr-defined]
    report = session.act

    def act(event: Any) -> None:
        """Between the result and the word of it."""
        if hangs.is_set() and threading.current_thread().name == "ftopt-reducer":
            free.wait(LIMIT_S)
        report(event)

    monkeypatch.setattr(session, "act", act)

    task = problem()
    models = [task.model(0) for _ in groups]

    def replica(index: int) -> None:
        model, step = models[index], 0
        with wrap(task.inner(model.parameters()), model, LocalSGD(sync_every=5), group=groups[index]) as optimizer:
            while not done.wait(0.002):
                optimizer.zero_grad()
                task.backward(model, index, step)
                optimizer.step()
                step += 1

    def watch() -> None:
        try:
            decisions.wait(["r0", "r1", "r2"], 2)
            hangs.set()
            decisions.wait(["r0", "r1"], 3)
            hangs.clear()
            free.set()
            decisions.wait(["r0", "r1", "r2"], 2)
        finally:
            free.set()
            done.set()

    together([lambda: replica(0), lambda: replica(1), lambda: replica(2), watch])
