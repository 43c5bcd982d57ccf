"""A global batch goes on from a checkpoint: the version is the cursor, with the same coordinator or another."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import ftopt
from ftopt._connect import local_groups
from ftopt.checkpoint.reader import Checkpoint, whole
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.sync.group import ReplicaGroup, Samples
from tests.checkpoint.conftest import no_waiting_for_the_disk as no_waiting_for_the_disk
from tests.optimizer.running import together
from tests.step.outer.test_global_batch import FAST, Points, inner, model, plain, same
from tests.step.outer.test_global_batch import even_shares as even_shares
from tests.test_restoring import lives

SAMPLES = Samples(samples=49, batch_size=2, global_batch=16, epochs=4)
"""Thirteen batches of eight units; the last of an epoch is short."""


def run(
    groups: Sequence[ReplicaGroup],
    folder: Path,
    *,
    samples: Samples = SAMPLES,
    resume: Path | None = None,
    dies_at: int = 1000,
) -> list[nn.Module]:
    """Trains to the end of the data, or until all die; a checkpoint at each third step."""

    def replica(group: ReplicaGroup, module: nn.Module) -> nn.Module:
        optimizer = ftopt.wrap(inner(module), module, ftopt.SyncSGD(), group=group)
        loader = ftopt.DataLoader(
            Points(samples.samples),
            samples.batch_size,
            group=group,
            epochs=samples.epochs,
            global_batch=samples.global_batch,
        )
        checkpoints = ftopt.Checkpoints(folder, optimizer, every=3)
        if resume is not None:
            checkpoints.resume(resume, replicas=[each.replica for each in groups])
        with optimizer:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
            checkpoints.include(loader=loader, scheduler=scheduler)
            all_have_joined.wait()  # else a fast one has left before a late one comes
            for micro_batches in loader.global_batches():
                for x, y in micro_batches:
                    nn.functional.mse_loss(module(x), y).backward()
                optimizer.step()
                scheduler.step()
                checkpoints.step()
                assert checkpoints._writer.wait(30)
                if optimizer.version == dies_at:
                    group.close()
                    raise KeyboardInterrupt
            checkpoints.close()
        return module

    models, all_have_joined = [model() for _ in groups], threading.Barrier(len(groups), timeout=60.0)
    tasks = [lambda i=i: replica(groups[i], models[i]) for i in range(len(groups))]
    if dies_at == 1000:
        return together(tasks)
    with pytest.raises(KeyboardInterrupt):
        together(tasks)
    return []


def units_after(events: Sequence[Event], version: int) -> list[int]:
    """Units in the commits of later versions, as often as they are in one."""
    ranges = [e.data["ranges"] for e in events if e.event == "decide" and e.version is not None and e.version > version]
    return sorted(u for each in ranges for parts in each.values() for start, stop in parts for u in range(start, stop))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three replicas have died at version 7: the newest checkpoint is of version 6."""
    folder = tmp_path_factory.mktemp("made")
    run(local_groups(3, policy=FAST), folder, dies_at=7)
    return whole(folder)[-1]


@pytest.mark.parametrize("names", [("r0", "r1", "r2"), ("r1",), ("r0", "r7"), ("r0", "r1", "r2", "r3", "r4")])
def test_the_steps_are_those_of_the_full_batch_and_each_sample_is_in_one(
    tmp_path: Path, made: Path, names: tuple[str, ...]
) -> None:
    found, events = Checkpoint(made), list[Event]()
    assert found.manifest.version == 6 and found.record["done"] == [[0, 48]]
    groups = local_groups(len(names), policy=FAST, names=list(names), on_event=events.append)
    expected = plain(SAMPLES)
    for ours in run(groups, tmp_path, resume=made):
        same(ours, expected)
    assert units_after(events, 6) == list(range(48, 100))


@pytest.mark.usefixtures("even_shares")  # else the order of the sums is another
def test_a_fault_free_resume_is_the_uninterrupted_run(tmp_path: Path, made: Path) -> None:
    uninterrupted = run(local_groups(3, policy=FAST), tmp_path / "a")
    resumed = run(local_groups(3, policy=FAST), tmp_path / "b", resume=made)
    for a, b in zip(uninterrupted, resumed, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_started_again_after_all_have_died_it_goes_on_by_itself(tmp_path: Path) -> None:
    events = list[Event]()
    with lives(("r0", "r1"), events, SAMPLES) as groups:
        run(groups[:2], tmp_path, dies_at=7)
        for ours in run(groups[2:], tmp_path):
            same(ours, plain(SAMPLES))
    again = [event.event for event in events].index("recover")
    assert events[again].version == 6
    assert units_after(events[again:], 6) == list(range(48, 100))


def test_another_global_batch_is_refused(tmp_path: Path, made: Path) -> None:
    other = Samples(samples=49, batch_size=2, global_batch=8, epochs=4)
    with pytest.raises(UserError, match=r"its job handed out .*global_batch=16.* this one .*global_batch=8"):
        run(local_groups(1, policy=FAST), tmp_path, samples=other, resume=made)
