"""`recover: replay`: the process in a dead replica's place does its inner steps again, and hands them in."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ftopt
from ftopt._connect import local_groups
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.sync.group import ReplicaGroup
from ftopt.watch.jsonl import record_of
from tests.optimizer.running import PATIENT, together
from tests.recounted import recounted
from tests.run.running import until

POLICY = replace(PATIENT, recover="replay", start_replicas=3)
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
    copy_every: int | None = None
    events: list[Event] = field(default_factory=list)
    losses: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    units: dict[str, list[int]] = field(default_factory=dict)

    def groups(self) -> list[ReplicaGroup]:
        names = ["r0", "r1", "r2", "r1"]
        policy = replace(POLICY, copy_every=self.copy_every)
        return local_groups(4, policy=policy, names=names, on_event=self.events.append)

    def run(self, group: ReplicaGroup, rounds: int, at: Callable[[int], None] = lambda step: None) -> None:
        """Trains so many rounds of the job; ``at`` is called after each inner step of this life."""
        model = deepcopy(MODEL)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ftopt.wrap(inner, model, replace(self.method(), codec=self.codec), group=group)
        loader = ftopt.DataLoader(
            DATA,
            5,
            group=group,
            seed=2,
            epochs=None,
            num_workers=self.workers,
        )
        with optimizer:
            for step, (inputs, targets) in enumerate(loader, 1):
                if optimizer.version >= rounds:
                    break
                loss = nn.functional.mse_loss(model(inputs), targets + inputs.sum(1, keepdim=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                key = (group.replica, group.incarnation)
                self.losses.setdefault(key, []).append(float(loss.detach()))
                at(step)
            optimizer.sync(propose=False)
            if group.replica == "r0":
                self.digests.append(optimizer.digest())

    def wait_for_copy(self, replica: str, versions: list[int]) -> None:
        """Until a neighbour keeps the copy that the replica has made at these versions."""
        until(lambda: any((e.replica, e.data["versions"]) == (replica, versions) for e in self.told("kept")))

    def told(self, name: str) -> list[Event]:
        return [event for event in self.events if event.event == name]


@cache
def fault_free(method: Callable[[], Any], rounds: int, **options: Any) -> Job:
    job = Job(method, **options)
    groups = job.groups()
    together([lambda g=g: job.run(g, rounds) for g in groups[:3]])
    return job


def with_a_death(
    method: Callable[[], Any],
    rounds: int,
    *,
    dies_at: int,
    again: int,
    versions: list[int] | None = None,
    spoil: Callable[[Job, list[ReplicaGroup]], None] = lambda job, groups: None,
    mute: Callable[[ReplicaGroup], _Mute] = lambda group: _Mute(group),
    **options: Any,
) -> Job:
    """``r1`` dies after so many steps. The others stand still until its replacement has done ``again`` steps. With
    ``copy_every`` it waits at each step until a neighbour has its copy.

    ``versions``: of the copy that is kept by then. ``spoil``: what happens before the replacement comes.
    """
    job = Job(method, **options)
    groups = job.groups()
    dead, caught_up = threading.Event(), threading.Event()

    def first_life() -> None:
        def at(step: int) -> None:
            if job.copy_every is not None:
                until(lambda: groups[1].copy_settled)
            if step == dies_at:
                if versions is not None:
                    job.wait_for_copy("r1", versions)
                raise Died

        with pytest.raises(Died):
            job.run(mute(groups[1]), rounds, at)  # type: ignore[arg-type]
        groups[1].close()
        spoil(job, groups)
        dead.set()

    def second_life() -> None:
        assert dead.wait(60)

        def at(step: int) -> None:
            if step == again:
                caught_up.set()

        job.run(groups[3], rounds, at)

    def survivor(group: ReplicaGroup) -> None:
        def at(step: int) -> None:
            if step == dies_at:
                assert caught_up.wait(60)

        job.run(group, rounds, at)

    together([lambda: survivor(groups[0]), first_life, lambda: survivor(groups[2]), second_life])
    return job


class _Mute:
    """A group whose replica dies: leaving says nothing."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def leave(self, *, timeout_s: float, early: bool = False, reason: str = "") -> None:
        """Dead replicas do not say goodbye."""

    def report(self, state: str) -> None:
        if state != "leaving":
            self._group.report(state)

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
    job = with_a_death(METHODS[name], 4, dies_at=2 * ROUND + 3, again=3, versions=[2])
    assert job.digests == whole.digests
    assert job.losses["r1", 2][:3] == job.losses["r1", 1][-3:]  # the very steps
    assert job.losses["r1", 2] == whole.losses["r1", 1][2 * ROUND :]
    (replay,) = job.told("replay")
    assert replay.data["of"] == ["r1", 1]
    assert replay.data["pending_by_fragment"] == [0]


@pytest.mark.parametrize(("every", "dies_at", "codec"), [(1, 2, "fp32"), (2, 3, "fp4")])
def test_a_copy_within_the_round_leaves_only_the_steps_after_it_to_be_done_again(
    every: int, dies_at: int, codec: str
) -> None:
    method = METHODS["DiLoCo"]
    whole = fault_free(method, 4, codec=codec)
    job = with_a_death(method, 4, dies_at=2 * ROUND + dies_at, again=1, copy_every=every, codec=codec)
    assert job.digests == whole.digests
    assert job.losses["r1", 2] == whole.losses["r1", 1][2 * ROUND + 2 :]
    (replay,) = job.told("replay")
    assert (replay.data["of"], replay.data["pending_by_fragment"]) == (["r1", 1], [2])
    once(job, 3 * 4 * ROUND)


def test_a_copy_that_changes_while_it_is_read_is_not_kept_and_the_one_before_is_used() -> None:
    class Torn(_Mute):
        copies = 0

        def offer_copy(self, versions: tuple[int, ...], text: str, tensors: Any) -> None:
            self.copies += 1
            if self.copies == 2 * (ROUND + 1):  # of rounds 1 and 2 all; of round 3 the copy after step 2
                name = next(name for name in tensors if name.startswith("inner"))
                tensors = {**tensors, name: tensors[name] + 1}
            self._group.offer_copy(versions, text, tensors)

    method = METHODS["DiLoCo"]
    whole = fault_free(method, 4)
    job = with_a_death(method, 4, dies_at=2 * ROUND + 2, again=2, copy_every=1, mute=Torn)
    (failed,) = job.told("keep_failed")
    assert "damaged" in failed.data["reason"] and failed.replica == "r1"
    (replay,) = job.told("replay")
    assert replay.data["pending_by_fragment"] == [1]
    assert job.digests == whole.digests
    once(job, 3 * 4 * ROUND)


def copied_steps(method: Method, steps: int, then: Callable[[ftopt.ReplicaOptimizer], object]) -> list[int]:
    """A replica with ``copy_every=1`` takes so many steps, then does ``then``: the steps in each of its copies."""
    (group,) = local_groups(1, policy=replace(POLICY, copy_every=1, start_replicas=1))
    copies: list[int] = []

    class Keeps(_Mute):
        copy_settled = True

        def offer_copy(self, versions: tuple[int, ...], text: str, tensors: Any) -> None:
            copies.append(json.loads(text)["value"]["local_steps"])

    model = nn.Linear(6, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ftopt.wrap(inner, model, method, group=Keeps(group), undo=True)  # type: ignore[arg-type]
    loader = ftopt.DataLoader(DATA, 5, group=group, epochs=None)
    optimizer.__enter__()
    try:
        for inputs, _ in islice(loader, steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        then(optimizer)
        return copies[:]
    finally:
        optimizer.close(flush=False)


def test_a_step_that_was_undone_is_not_in_the_copy_that_is_kept() -> None:
    assert copied_steps(ftopt.LocalSGD(sync_every=9), 2, ftopt.undo.undo_step) == [1, 2, 1]


def test_error_feedback_is_inherited_too() -> None:
    method = METHODS["DiLoCo"]
    whole = fault_free(method, 4, codec="fp4")
    job = with_a_death(method, 4, dies_at=2 * ROUND + 3, again=3, versions=[2], codec="fp4")
    assert job.losses["r1", 2] == whole.losses["r1", 1][2 * ROUND :]


def test_overlapping_outer_steps_leave_pending_work_which_is_inherited_as_it_is() -> None:
    def method() -> Any:
        return ftopt.StreamingDiLoCo(
            sync_every=8, fragments=ftopt.fragments.Strided(n=2), delay=1, wait_for_result_s=60.0
        )

    whole = fault_free(method, 3)
    job = with_a_death(method, 3, dies_at=15, again=2, versions=[1, 2])
    (replay,) = job.told("replay")
    assert replay.data["pending_by_fragment"] == [5, 1]
    ours, theirs = job.losses["r1", 2], whole.losses["r1", 1][13:]
    common = min(len(ours), len(theirs))  # the last round ends beside the last step: before it or after it
    assert abs(len(ours) - len(theirs)) <= 1 and ours[:common] == theirs[:common]
    assert job.digests == whole.digests


def test_workers_load_the_inherited_batches_in_their_order() -> None:
    method = METHODS["DiLoCo"]
    job = with_a_death(method, 3, dies_at=ROUND + 3, again=3, versions=[1], workers=1)
    assert job.losses["r1", 2][:3] == job.losses["r1", 1][-3:]


@pytest.mark.parametrize("codec", ["fp32", "fp4"])
def test_the_samples_of_a_dead_replica_are_in_one_commit_each(codec: str) -> None:
    job = with_a_death(METHODS["DiLoCo"], 4, dies_at=2 * ROUND + 2, again=2, versions=[2], codec=codec)
    once(job, 3 * 4 * ROUND)


def once(job: Job, count: int | None = None) -> None:
    """Every unit that was committed is in one commit, and there are so many."""
    entries = recounted([record_of(event) for event in job.events]).entries()
    assert {entry.times for entry in entries} == {1}
    assert count in (None, sum(entry.stop - entry.start for entry in entries))


def test_before_the_first_round_has_ended_there_is_nothing_to_go_on_from() -> None:
    job = with_a_death(METHODS["DiLoCo"], 3, dies_at=2, again=1)
    assert not job.told("replay") and not job.told("replay_failed")
    once(job)


def test_a_copy_is_void_when_a_later_contribution_is_in_a_commit() -> None:
    """It has died between that commit and the next copy: what the copy knows is counted."""
    job = Job(METHODS["DiLoCo"])
    groups = job.groups()
    dead = threading.Event()

    def first_life() -> None:
        def at(step: int) -> None:
            if step == 2 * ROUND:
                raise Died

        class Silent(_Mute):
            def offer_copy(self, versions: tuple[int, ...], text: str, tensors: Any) -> None:
                if versions == (1,):
                    self._group.offer_copy(versions, text, tensors)

        with pytest.raises(Died):
            job.run(Silent(groups[1]), 4, at)  # type: ignore[arg-type]
        groups[1].close()
        dead.set()

    def second_life() -> None:
        assert dead.wait(60)
        job.run(groups[3], 4)

    def survivor(group: ReplicaGroup) -> None:
        def at(step: int) -> None:
            if step == 2 * ROUND + 1:
                assert dead.wait(60)
                until(lambda: bool([e for e in job.told("join") if e.incarnation == 2]))

        job.run(group, 4, at)

    together([lambda: survivor(groups[0]), first_life, lambda: survivor(groups[2]), second_life])
    assert not job.told("replay")
    once(job)


def test_when_the_keeper_is_gone_too_its_samples_are_still_trained_on() -> None:
    def spoil(job: Job, groups: list[ReplicaGroup]) -> None:
        groups[2].cut(0.3)  # type: ignore[attr-defined]
        until(lambda: any(e.replica == "r2" for e in job.told("lost")))

    job = with_a_death(METHODS["DiLoCo"], 3, dies_at=ROUND + 2, again=1, versions=[1], spoil=spoil)
    assert not job.told("replay")
    once(job)


def test_a_damaged_copy_is_refused_and_the_samples_are_trained_on() -> None:
    def spoil(job: Job, groups: list[ReplicaGroup]) -> None:
        keeper: Any = groups[2]
        copy = keeper.session.copies._kept["r1"]
        next(t for name, t in copy.tensors.items() if name.startswith("inner")).view(-1)[0] += 1

    job = with_a_death(METHODS["DiLoCo"], 3, dies_at=ROUND + 2, again=1, versions=[1], spoil=spoil)
    (failed,) = job.told("replay_failed")
    assert "damaged" in failed.data["reason"]
    assert not job.told("replay")
    once(job)


def test_without_a_ledger_it_is_refused() -> None:
    model = deepcopy(MODEL)
    group = local_groups(1, policy=replace(POLICY, start_replicas=1))[0]
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, METHODS["DiLoCo"](), group=group)
    with pytest.raises(UserError, match=r"policy\.recover=replay needs a sample ledger"), optimizer:
        pass
