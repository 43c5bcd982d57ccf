"""Two ranks of one island, alone in its jobs, for tests of single situations; by torchrun:
``python -m tests.island.slicing``."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftopt
from ftopt.errors import FtoptError
from ftopt.methods import Method
from tests.island.lasting import all_alike, whole


def sharded(width: int = 4000) -> nn.Module:
    """A model of several blocks of a slice: both ranks have one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 1))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def wrapped(
    name: str,
    model: nn.Module,
    method: Method,
    *,
    group: ftopt.ReplicaGroup | None = None,
    leave: bool = False,
) -> ftopt.ReplicaOptimizer:
    """A job of this island alone."""
    policy = ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, stragglers="wait")
    group = group or ftopt.connect(job=name, policy=policy)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    return ftopt.wrap(inner, model, method, group=group, leave_on_signals=leave)


def step(model: nn.Module, optimizer: ftopt.ReplicaOptimizer, factor: float = 1.0) -> None:
    """An inner step; ``factor`` of this rank's loss."""
    optimizer.zero_grad()
    (model(torch.ones(2, 7)).square().mean() * factor).backward()
    optimizer.step()


def gives_up_its_last_steps() -> None:
    """The last steps of the data are given up when a version is applied: all ranks come to the end alike."""
    group = ftopt.connect(
        job="units", policy=ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, stragglers="wait")
    )
    model = sharded()
    method = ftopt.StreamingDiLoCo(sync_every=4, fragments=ftopt.fragments.Balanced(n=1), delay=2)
    optimizer = wrapped("units", model, method, group=group)
    loader = ftopt.DataLoader(list(range(12)), batch_size=2, group=group)
    with optimizer:
        for number, _ in enumerate(loader):
            step(model, optimizer, float("nan") if number == 5 else 1.0)
        assert all_alike((optimizer.status.versions, optimizer.local_steps)) and optimizer.local_steps == 6


def one_rank_is_not_finite() -> None:
    """What is not finite on one rank is given up on all."""
    model = sharded()
    optimizer = wrapped("nan", model, ftopt.DiLoCo(sync_every=2))
    with optimizer:
        for number in range(8):
            if number == 3:
                with torch.no_grad():
                    for p in list(model.parameters())[-2:]:
                        if dist.get_rank() == 1 and p.to_local().numel():
                            p.to_local().fill_(float("nan"))
            step(model, optimizer)
        assert optimizer.sync()
        assert all(bool(torch.isfinite(whole(p)).all()) for p in model.parameters())
        assert all_alike((optimizer.status.versions, optimizer.status.pending_steps))


def closure_raises(who: int) -> None:
    """After an error that has left a closure on one rank, the other one does not wait."""
    model = nn.Linear(300, 300)
    optimizer = wrapped(f"raises-{who}", model, ftopt.DiLoCo(sync_every=2))

    def bad() -> float:
        if dist.get_rank() == who:
            raise FloatingPointError("a bad batch")
        return 0.0

    optimizer.step(lambda: 0.0)
    with pytest.raises(FtoptError, match=r"an earlier call|another rank of this|is gone|has left"):
        for _ in range(3):
            try:
                optimizer.step(bad)
            except FloatingPointError:
                continue
    optimizer.close()


def leaves_nothing() -> None:
    """Threads of the island end with it."""
    model = sharded()
    method = ftopt.StreamingDiLoCo(sync_every=4, fragments=ftopt.fragments.Balanced(n=2), delay=2)
    optimizer = wrapped("threads", model, method)
    with optimizer:
        for _ in range(9):
            step(model, optimizer)
    for thread in threading.enumerate():
        if thread.name.startswith(("ftopt-rank", "ftopt-slice", "ftopt-lane", "ftopt-relay", "ftopt-reducer")):
            thread.join(60.0)
            assert not thread.is_alive(), thread.name


def note_goodbyes(group: ftopt.ReplicaGroup, goodbyes: list[bool]) -> None:
    """Adds to ``goodbyes`` of each whether it is early."""
    leave = group.leave

    def tell(**how: Any) -> None:
        goodbyes.append(how["early"])
        leave(**how)

    group.leave = tell  # type: ignore[method-assign]


def leaves_without_a_flush() -> None:
    """Rank 0 says goodbye: at its end, and early after an error."""
    for job, error in (("at-once", None), ("at-once-early", ZeroDivisionError())):
        policy = ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, stragglers="wait")
        group = ftopt.connect(job=job, policy=policy)
        goodbyes: list[bool] = []
        if dist.get_rank() == 0:
            note_goodbyes(group, goodbyes)
        model = nn.Linear(300, 300)
        optimizer = wrapped(job, model, ftopt.DiLoCo(sync_every=2), group=group)
        optimizer.step(lambda: 0.0)
        dist.barrier()
        try:
            if error is not None:
                raise error
        except ZeroDivisionError:
            optimizer.close(flush=False)
        optimizer.close(flush=False)
        assert goodbyes == ([error is not None] if dist.get_rank() == 0 else [])
        if dist.get_rank() == 0 and error is None:  # else the other rank's end may have come before
            assert group.session.connection.said_bye  # type: ignore[attr-defined]
        dist.barrier()


def is_told_to_leave_at_its_end() -> None:
    """A signal that comes while the last steps are handed in finds a replica at its end; one before does not."""
    for when in ("before", "meanwhile"):
        job = f"told-{when}"
        policy = ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, stragglers="wait")
        group = ftopt.connect(job=job, policy=policy)
        goodbyes: list[bool] = []
        if dist.get_rank() == 0:
            note_goodbyes(group, goodbyes)
        model = nn.Linear(300, 300)
        optimizer = wrapped(job, model, ftopt.DiLoCo(sync_every=2), group=group, leave=True)
        optimizer.step(lambda: 0.0)

        def tell(timeout_s: float = 0.0) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        if when == "before":
            tell()
        else:
            optimizer._core.saving.before_leaving = tell
        optimizer.close()
        assert goodbyes == ([when == "before"] if dist.get_rank() == 0 else []), job
        dist.barrier()


CASES: list[Callable[[], None]] = [
    is_told_to_leave_at_its_end, one_rank_is_not_finite, gives_up_its_last_steps, leaves_nothing,
    leaves_without_a_flush, lambda: closure_raises(0), lambda: closure_raises(1),
]  # fmt: skip


def main() -> None:
    """One rank."""
    dist.init_process_group("gloo")
    for case in CASES:
        case()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
