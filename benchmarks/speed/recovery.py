"""What a death in the middle of a step costs by way of recovery: undo, replay, or checkpoint and restart."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ftopt
from benchmarks.speed.crew import coordinator
from benchmarks.speed.figures import Row, Spread
from tests.forkserver import CONTEXT, die_with_parent

EVERY, SAVED_EVERY, AT = 20, 2, 73
"""Inner steps of a round, rounds between two checkpoints, and the inner step in which a replica dies."""
STEP_S = 0.01
NONE, UNDO, REPLAY, CHECKPOINT = "none", "undo", "replay", "checkpoint"
WAYS = (UNDO, REPLAY, CHECKPOINT)
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
INNERS: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=5e-3),
    "SGD, momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ABOUT = (
    f"Two replicas, real processes, DiLoCo with a round every {EVERY} inner steps of {1000 * STEP_S:g} ms, 70,000 "
    f"parameters. In its {AT}rd inner step, when half of the parameters are updated, a replica fails. *undo*: the step "
    "raises, `undo_step` restores the parameters, and the step is computed again. *replay*: SIGKILL; a new process "
    "under the same id repeats the round's steps from the neighbour's copy; meanwhile the other one makes no outer "
    "step (`min_replicas` 2). *checkpoint*: SIGKILL for all; new processes resume, as a new job, from a checkpoint of "
    f"every {SAVED_EVERY}nd round. New processes begin with torch imported. *s*: from the failure until all that were "
    "restarted have taken this step. *again*: inner steps of all replicas that are computed again, that one included. "
    "*difference*: largest difference of a parameter, after that step, to a run without the failure, relative to the "
    "largest value of its tensor; the largest of all repetitions."
)
GOALS = "replay and checkpoint: difference 0; undo: a rounding error"
PAGE = "checkpoints.md"
DRAWN = "s"
SCALE = "log"
_SETTLE_S = 0.3
"""Copies and checkpoints that are under way become complete before the failure."""
_LIMIT_S = 60.0


class _Failed(RuntimeError):
    """The failure of a step."""


def run(quick: bool) -> list[Row]:
    """A row an inner optimizer, precision and way."""
    inners, repetitions = (["AdamW"], 2) if quick else (list(INNERS), 3)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ftopt-bench-") as name, coordinator(Path(name)) as url:
        numbers = itertools.count()

        def measure(inner: str, precision: str, way: str) -> dict[int, Any]:
            folder = Path(name) / f"job-{next(numbers)}"
            folder.mkdir()
            return _measure({"url": url, "folder": folder, "inner": inner, "precision": precision, "way": way})

        for inner, precision in itertools.product(inners, PRECISIONS):
            whole = measure(inner, precision, NONE)
            for way in WAYS:
                rows.append(
                    _row(inner, precision, way, [measure(inner, precision, way) for _ in range(repetitions)], whole)
                )
    return rows


def _row(inner: str, precision: str, way: str, found: list[dict[int, Any]], whole: dict[int, Any]) -> Row:
    off = max(difference(end["params"], whole[rank]["params"]) for ends in found for rank, end in ends.items())
    return {
        "inner": inner,
        "precision": precision,
        "way": way,
        "s": Spread.of([max(end["seconds"] for end in ends.values()) for ends in found]),
        "again": sorted(sum(end["steps"] for end in ends.values()) for ends in found)[len(found) // 2],
        "difference": f"{off:.1e}" if off else "0",
    }


def difference(ours: list[Tensor], whole: list[Tensor]) -> float:
    """The largest of an element, relative to the largest element of its tensor."""
    pairs = [(a.double(), b.double()) for a, b in zip(ours, whole, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _measure(told: dict[str, Any]) -> dict[int, Any]:
    """What the replicas that failed (without a failure: all) have saved after the step; by rank."""
    members = [_start(rank, told, life=1) for rank in range(2)]
    folder: Path = told["folder"]
    failed = (1,) if told["way"] in (UNDO, REPLAY) else (0, 1)
    ends = {rank: folder / f"end-{rank}.pt" for rank in failed}
    deadline = time.monotonic() + _LIMIT_S
    try:
        while not all(path.exists() for path in ends.values()):
            if members[1].exitcode == -signal.SIGKILL:
                for rank in failed:
                    members[rank].kill()
                    members[rank].join()
                    ends[rank].unlink(missing_ok=True)
                    members[rank] = _start(rank, told, life=2)
            elif any(member.exitcode is not None for member in members) or time.monotonic() > deadline:
                raise RuntimeError(f"{told}: exit codes {[member.exitcode for member in members]}")
            time.sleep(0.002)
    finally:
        for member in members:
            member.kill()
            member.join()
    found = {rank: torch.load(path) for rank, path in ends.items()}
    struck_s = float((folder / "failed").read_text()) if told["way"] != NONE else 0.0
    return {rank: end | {"seconds": end["at_s"] - struck_s} for rank, end in found.items()}


def _start(rank: int, told: dict[str, Any], life: int) -> BaseProcess:
    member = CONTEXT.Process(target=_replica, args=(rank, told, life), daemon=True)
    member.start()
    return member


def _replica(rank: int, told: dict[str, Any], life: int) -> None:
    die_with_parent()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    way, folder, dtype = told["way"], Path(told["folder"]), PRECISIONS[told["precision"]]
    model = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 8)).to(dtype)
    policy = ftopt.FaultPolicy(
        start_replicas=2, min_replicas=2, grace_s=30.0, dead_after_s=30.0, heartbeat_s=0.5, stragglers="wait",
        recover="replay" if way == REPLAY else "drop",
    )  # fmt: skip
    job = folder.name + ("-resumed" if way == CHECKPOINT and life == 2 else "")
    group = ftopt.connect(told["url"], f"r{rank}", job=job, policy=policy)
    inner = [INNERS[told["inner"]](layer.parameters()) for layer in (model[0], model[2])]
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=EVERY), group=group, undo=way == UNDO)
    inner[1].register_step_pre_hook(lambda *_: _fail(optimizer, folder, way) if rank else None)
    data = torch.utils.data.TensorDataset(torch.randn(4000, 8))
    loader = ftopt.DataLoader(data, 4, group=group, seed=2, epochs=None)
    checkpoints = ftopt.Checkpoints(folder / "checkpoint", optimizer, every=SAVED_EVERY) if way == CHECKPOINT else None
    if checkpoints is not None:
        checkpoints.resume()
    steps = 0

    def step(x: Tensor) -> None:
        time.sleep(STEP_S)
        optimizer.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()

    with optimizer:
        if checkpoints is not None:
            checkpoints.include(loader=loader)
        for (x,) in loader:
            steps += 1
            try:
                step(x.to(dtype))
            except _Failed:
                ftopt.undo.undo_step(optimizer)
                steps = 1
                step(x.to(dtype))
            if checkpoints is not None:
                checkpoints.step()
            if optimizer.inner_step == AT:
                end = {"at_s": time.time(), "steps": steps, "params": [p.detach().clone() for p in model.parameters()]}
                torch.save(end, folder / f"new-{rank}")
                (folder / f"new-{rank}").rename(folder / f"end-{rank}.pt")


def _fail(optimizer: ftopt.ReplicaOptimizer, folder: Path, way: str) -> None:
    """In the middle of the step, once."""
    if way == NONE or optimizer.inner_step != AT - 1:
        return
    with suppress(FileExistsError), (folder / "failed").open("x") as file:
        time.sleep(_SETTLE_S)
        file.write(str(time.time()))
        file.flush()
        if way == UNDO:
            raise _Failed
        os.kill(os.getpid(), signal.SIGKILL)
