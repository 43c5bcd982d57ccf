"""With Python's cyclic collector off, as some trainers have it, tensors go when they are not needed any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import ftopt
from ftopt import PAFT, Checkpoints, DataLoader, DiLoCo, FaultPolicy, LocalSGD, SlowMo, StreamingDiLoCo, SyncSGD
from ftopt._connect import local_groups
from ftopt.methods import Method

SIZE = 40


@pytest.fixture(scope="module", autouse=True)
def freezes() -> None:
    """All that is there already need not be looked through by each collection: what a test itself leaves counts."""
    _train(LocalSGD(sync_every=1))  # torch's own first step leaves cycles
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _garbage() -> list[tuple[int, ...]]:
    """The shapes of all tensors that only the collector frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [tuple(each.shape) for each in gc.garbage if isinstance(each, Tensor)]
    gc.garbage.clear()
    gc.collect()
    return found


def _train(
    method: Method,
    policy: FaultPolicy | None = None,
    *,
    loader: bool = False,
    folder: Path | None = None,
    **options: Any,
) -> list[tuple[int, ...]]:
    """A job of one replica; what its outer steps leave to the collector."""
    model = nn.Linear(SIZE, SIZE)
    (group,) = local_groups(1, policy=policy)
    optimizer = ftopt.wrap(torch.optim.AdamW(model.parameters()), model, method, group=group, **options)
    kept = None if folder is None else Checkpoints(folder, optimizer, every=1)
    data = DataLoader(TensorDataset(torch.randn(60, SIZE)), 2, group=group, seed=0) if loader else None
    scheduler = StepLR(optimizer, 10)
    if kept is not None:
        kept.include(scheduler=scheduler, **{} if data is None else {"loader": data})
    batches = iter([[torch.randn(2, SIZE)]] * 12 if data is None else data)
    with optimizer:
        for step in range(10):
            model(next(batches)[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if kept is not None:
                kept.step()
            if step == 3:
                gc.collect()
        found = _garbage()
    if kept is not None:
        kept.close()
    return found


@pytest.mark.parametrize(
    ("method", "policy", "options"),
    [
        (LocalSGD(sync_every=1), None, {}),
        (DiLoCo(sync_every=2), None, {"undo": True}),
        (DiLoCo(sync_every=1, codec="int8"), None, {}),
        (SlowMo(sync_every=2), None, {}),
        (StreamingDiLoCo(sync_every=4, fragments=ftopt.fragments.Strided(n=1), delay=1), None, {}),
        (SyncSGD(), None, {}),
        (PAFT(sync_every=2), None, {}),
        (DiLoCo(sync_every=1), FaultPolicy(recover="replay"), {"loader": True}),
    ],
    ids=["local_sgd", "undo", "int8", "slowmo", "streaming", "sync_sgd", "paft", "replay"],
)
def test_neither_outer_steps_nor_a_job_that_is_over_leave_tensors_to_the_collector(
    method: Method, policy: FaultPolicy | None, options: dict[str, Any], tmp_path: Path
) -> None:
    assert _train(method, policy, **options) == []
    assert _garbage() == []


def test_checkpoints_and_what_they_include_leave_no_tensors_to_the_collector(tmp_path: Path) -> None:
    assert _train(DiLoCo(sync_every=2), loader=True, folder=tmp_path) == []
    assert _garbage() == []
