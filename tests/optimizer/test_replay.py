"""`recover: replay`: the process in a dead replica's place does its inner steps again, and hands them in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ftopt
from ftopt.connect import local_groups
from ftopt.events import Event
from ftopt.sync.group import ReplicaGroup
from tests.optimizer.running import PATIENT, together

SYNC = replace(PATIENT, recover="replay", start_replicas=3)
ROUND = 4
DATA = TensorDataset(torch.randn(4000, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(4000, 1))


torch.manual_seed(3)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class Died(Exception):
    """The test's: a replica ends without a word."""


@dataclass
class Job:
    """Three replicas and, when ``r1`` has died, another process in its place."""

    method: Callable[[], Any]
    codec: str = "fp32"
    workers: int = 0
    events: list[Event] = field(default_factory=list)
    losses: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    units: dict[str, list[int]] = field(default_factory=dict)

    def groups(self) -> list[ReplicaGroup]:
        names = ["r0", "r1", "r2", "r1"]
        return local_groups(4, sync=replace(SYNC, codec=self.codec), names=names, on_event=self.events.append)

    def run(self, group: ReplicaGroup, rounds: int, at: Callable[[int], None] = lambda step: None) -> None:
        """Trains so many rounds of the job; ``at`` is called after each inner step of this life."""
        model = deepcopy(MODEL)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ftopt.wrap(inner, model, self.method(), group=group)
        loader = ftopt.DataLoader(DATA, 5, group=group, seed=2, epochs=None, num_workers=self.workers)
        with optimizer:
            for step, (inputs, targets) in enumerate(loader, 1):
                if optimizer.committed.version >= rounds:
                    break
                loss = nn.functional.mse_loss(model(inputs), targets + inputs.sum(1, keepdim=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                key = (group.replica, group.incarnation)
                self.losses.setdefault(key, []).append(float(loss.detach()))
                at(step)
            optimizer.settle()
            if group.replica == "r0":
                self.digests.append(optimizer.anchor_digest())

    def told(self, name: str) -> list[Event]:
        return [event for event in self.events if event.event == name]


def fault_free(method: Callable[[], Any], rounds: int, **options: Any) -> Job:
    job = Job(method, **options)
    groups = job.groups()
    together([lambda g=g: job.run(g, rounds) for g in groups[:3]])
    return job


def with_a_death(method: Callable[[], Any], rounds: int, *, dies_at: int, **options: Any) -> Job:
    """``r1`` dies after so many steps. The others stand still until its replacement has done as many."""
    job = Job(method, **options)
    groups = job.groups()
    dead, caught_up = threading.Event(), threading.Event()

    def first_life() -> None:
        def at(step: int) -> None:
            if step == dies_at:
                raise Died

        with pytest.raises(Died):
            job.run(_Mute(groups[1]), rounds, at)  # type: ignore[arg-type]
        groups[1].close()
        dead.set()

    def second_life() -> None:
        assert dead.wait(30)

        def at(step: int) -> None:
            if step == dies_at % ROUND:
                caught_up.set()

        job.run(groups[3], rounds, at)

    def survivor(group: ReplicaGroup) -> None:
        def at(step: int) -> None:
            if step == dies_at:
                assert caught_up.wait(30)

        job.run(group, rounds, at)

    together([lambda: survivor(groups[0]), first_life, lambda: survivor(groups[2]), second_life])
    return job


class _Mute:
    """A group whose replica dies: leaving says nothing."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def leave(self, *, timeout_s: float) -> None:
        """Dead replicas do not say goodbye."""

    def report(self, *, state: str, inner_step: int, step_s: float) -> None:
        if state != "leaving":
            self._group.report(state=state, inner_step=inner_step, step_s=step_s)

    def propose(self, contribution: Any, *, now: bool = False) -> None:
        self._group.propose(contribution, now=now)


METHODS: dict[str, Callable[[], Any]] = {
    "DiLoCo": lambda: ftopt.DiLoCo(sync_every=ROUND),
    "LocalSGD": lambda: ftopt.LocalSGD(sync_every=ROUND),
    "SlowMo": lambda: ftopt.SlowMo(sync_every=ROUND),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_replacement_makes_the_job_what_it_would_have_been_bit_for_bit(name: str) -> None:
    whole = fault_free(METHODS[name], 4)
    job = with_a_death(METHODS[name], 4, dies_at=2 * ROUND + 3)
    assert job.digests == whole.digests
    assert job.losses["r1", 2][:3] == job.losses["r1", 1][-3:]  # the very steps
    assert job.losses["r1", 2] == whole.losses["r1", 1][2 * ROUND :]
    (replay,) = job.told("replay")
    assert replay.data["of"] == ["r1", 1]
    assert replay.data["pending_by_fragment"] == [0]


def test_the_samples_of_a_dead_replica_are_in_one_commit_each() -> None:
    job = with_a_death(METHODS["DiLoCo"], 4, dies_at=2 * ROUND + 2)
    ranges = [
        part for event in job.told("decide") for parts in event.data["ranges"].values() for part in parts
    ]  # fmt: skip
    units = [unit for start, stop in ranges for unit in range(start, stop)]
    assert len(units) == len(set(units)) == 3 * 4 * ROUND
