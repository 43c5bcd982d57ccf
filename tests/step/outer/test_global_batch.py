"""A global batch over replicas of one process: the step is that of the full batch, however it is shared out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt._connect import local_groups, solo
from ftopt.data.batches import Batches
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.sync.group import FaultPolicy, ReplicaGroup, Samples
from ftopt.sync.protocol.ledger import plans
from tests.problems import seeded
from tests.sync.protocol.batch_table import batch

FAST = FaultPolicy(grace_s=60.0, heartbeat_s=0.05, dead_after_s=60.0)
"""Shares are told often, and a replica that is slow keeps its own."""
LIMIT_S = 100.0


@pytest.fixture
def even_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """However unlike the replicas' speeds look on a busy machine."""
    monkeypatch.setattr(plans, "WORTH_S", math.inf)


class Points:
    """A data set for regression: 4 numbers in, 2 out."""

    random = False

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = torch.randn(count, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def model() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def inner(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain(samples: Samples) -> nn.Module:
    """The same with one model, and each global batch at once."""
    module, batches = model(), Batches(Points(samples.samples), samples)
    optimizer = inner(module)
    version = 1
    while units := batch(samples, version):
        parts = [batches[unit] for start, stop in units for unit in range(start, stop)]
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
        version += 1
    return module


def train(group: ReplicaGroup, samples: Samples, found: list[nn.Module], method: Any = None) -> None:
    module = model()
    optimizer = ftopt.wrap(inner(module), module, method or ftopt.SyncSGD(), group=group)
    loader = ftopt.DataLoader(
        Points(samples.samples),
        samples.batch_size,
        group=group,
        epochs=samples.epochs,
        drop_last=samples.drop_last,
        global_batch=samples.global_batch,
    )
    with optimizer:
        for micro_batches in loader.global_batches():
            for x, y in micro_batches:
                nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
        found.append(module)


def together(groups: list[ReplicaGroup], samples: Samples) -> list[nn.Module]:
    found: list[nn.Module] = []
    threads = [threading.Thread(target=train, args=(group, samples, found), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert len(found) == len(groups)
    return found


def same(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("batch_size", "replicas"), [(2, 1), (4, 2), (2, 3), (4, 3), (4, 5)])
def test_the_steps_are_those_of_the_full_batch(replicas: int, batch_size: int) -> None:
    """Four micro-batches over three replicas, and over five: one has none. The epochs' last units are short."""
    samples = Samples(samples=50 if batch_size == 4 else 49, batch_size=batch_size, global_batch=16, epochs=2)
    expected = plain(samples)
    for ours in together(local_groups(replicas, policy=FAST), samples):
        same(ours, expected)


def test_every_unit_is_in_one_commit_and_computed_once() -> None:
    events: list[Event] = []
    samples = Samples(samples=50, batch_size=4, global_batch=12, epochs=1)
    together(local_groups(3, policy=FAST, on_event=events.append), samples)
    parts = [part for e in events if e.event == "micro_batch" for part in e.data["units"]]
    computed = sorted(unit for start, stop in parts for unit in range(start, stop))
    assert computed == list(range(13))
    ranges = [part for e in events if e.event == "decide" for parts in e.data["ranges"].values() for part in parts]
    assert sorted(unit for start, stop in ranges for unit in range(start, stop)) == list(range(13))
    assert [e.event for e in events if e.event in ("epoch_done", "data_ended")] == ["epoch_done", "data_ended"]


def test_a_step_before_the_batch_is_whole_is_refused() -> None:
    group = solo()
    group.keep_global_batch(Samples(samples=20, batch_size=2, global_batch=8))
    module = model()
    optimizer = ftopt.wrap(inner(module), module, ftopt.SyncSGD(), group=group)
    with optimizer, pytest.raises(UserError, match="before the global batch is whole"):
        optimizer.step()


def test_a_batch_whose_step_was_not_taken_is_told() -> None:
    group = solo()
    module = model()
    optimizer = ftopt.wrap(inner(module), module, ftopt.SyncSGD(), group=group)
    loader = ftopt.DataLoader(Points(20), 2, group=group, global_batch=8)
    with optimizer:
        batches = loader.global_batches()
        for x, y in next(batches):
            nn.functional.mse_loss(module(x), y).backward()
        with pytest.raises(UserError, match=r"call optimizer.step\(\)"):
            next(batches)


@pytest.mark.parametrize(
    "method", [ftopt.DiLoCo(sync_every=5), ftopt.LocalSGD(sync_every=1), ftopt.SyncSGD(sync_every=2)]
)
def test_other_methods_are_refused(method: Any) -> None:
    group = solo()
    group.keep_global_batch(Samples(samples=20, batch_size=2, global_batch=8))
    module = model()
    optimizer = ftopt.wrap(inner(module), module, method, group=group)
    with pytest.raises(UserError, match=r"in a job with a global batch; .* use ftopt.SyncSGD"):
        optimizer.__enter__()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ftopt.DataLoader(Points(20), 2, global_batch=8), "needs a group"),
        (lambda: ftopt.DataLoader(Points(20), 3, group=solo(), global_batch=8), "must be a multiple of it"),
        (lambda: list(ftopt.DataLoader(Points(20), 2, group=solo(), global_batch=8)), "loader.global_batches"),
        (lambda: ftopt.DataLoader(Points(20), 2).global_batches(), "without a global batch"),
    ],
)
def test_mistakes_are_told(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()


@pytest.mark.parametrize(("which", "factor"), [(0, float("nan")), (1, 1e15)], ids=["not finite", "out of line"])
def test_a_batch_with_a_bad_share_is_the_mean_of_the_others(which: int, factor: float) -> None:
    events: list[Event] = []
    groups = local_groups(2, policy=FAST, on_event=events.append)
    samples = Samples(samples=16, batch_size=4, global_batch=8, epochs=1)
    found: list[nn.Module] = []

    class Damaged(Points):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(index)
            return (x, y * factor) if index in poisoned else (x, y)

    order = Batches(Points(16), samples)
    poisoned = {int((Points(16).inputs == row).all(1).nonzero()) for row in order[2 * which][0]}

    def run(group: ReplicaGroup) -> None:
        module = model()
        optimizer = ftopt.wrap(inner(module), module, ftopt.SyncSGD(), group=group)
        loader = ftopt.DataLoader(Damaged(16), 4, group=group, global_batch=8)
        with optimizer:
            for micro_batches in loader.global_batches():
                for x, y in micro_batches:
                    nn.functional.mse_loss(module(x), y).backward()
                optimizer.step()
            found.append(module)

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(found) == 2
    same(found[0], found[1])
    assert all(bool(torch.isfinite(p).all()) for p in found[0].parameters())
    members = [e.data["members"] for e in events if e.event == "decide"]
    left_out = [(e.data["steps"], e.data["reason"]) for e in events if e.event == "discarded"]
    assert left_out == [(1, "outlier" if which else "nonfinite")]
    good, bad = [[4.0, True], [4.0, True]], [[0.0, False], [4.0, True]]
    assert [sorted(row[4:] for row in rows) for rows in members] == ([bad, good] if which == 0 else [good, bad])


def test_one_that_evaluates_meanwhile_loses_its_share_and_catches_up() -> None:
    samples = Samples(samples=60, batch_size=2, global_batch=8, epochs=1)
    ahead = threading.Event()

    def listen(event: Event) -> None:
        if event.event == "decide" and event.version == 4:
            ahead.set()

    groups = local_groups(2, policy=FaultPolicy(grace_s=0.3, heartbeat_s=0.05, dead_after_s=60.0), on_event=listen)
    found: list[nn.Module] = []

    def evaluate() -> None:
        module = model()
        optimizer = ftopt.wrap(inner(module), module, ftopt.SyncSGD(), group=groups[1])
        loader = ftopt.DataLoader(Points(60), 2, group=groups[1], global_batch=8)
        with optimizer:
            for micro_batches in loader.global_batches():
                for x, y in micro_batches:
                    nn.functional.mse_loss(module(x), y).backward()
                optimizer.step()
                if optimizer.version == 1:
                    with optimizer.busy("evaluating"):
                        assert ahead.wait(LIMIT_S)
            found.append(module)

    threads = [
        threading.Thread(target=train, args=(groups[0], samples, found), daemon=True),
        threading.Thread(target=evaluate, daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(found) == 2
    for module in found:
        same(module, plain(samples))
