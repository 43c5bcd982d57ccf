"""What a death in the middle of a step costs: gradients are kept, or the batch shrinks, or all begin anew."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import ftopt
from benchmarks.speed.crew import coordinator
from benchmarks.speed.figures import Row
from ftopt.watch.jsonl import read_lines
from tests.forkserver import CONTEXT, die_with_parent

MICRO_BATCHES = 8
MICRO_BATCH = 4
"""Samples."""
KEEP, SHRINK, DISCARD = "keep the gradients", "shrink the batch", "discard the step"
ABOUT = (
    f"Replicas with SyncSGD, each with {MICRO_BATCHES} micro-batches a step, a wait of 10 ms each; each in turn "
    f"gets SIGKILL in its {MICRO_BATCHES // 2}th micro-batch, and is started again at once. *{KEEP}*: a global batch, "
    f"whose missing samples the survivors compute. *{SHRINK}*: the step has fewer samples. *{DISCARD}*: computed "
    "from the steps without kills: survivors compute the whole step again, as when a failed all-reduce takes "
    "its gradients along. *wasted*: micro-batches per kill that are in no step. *missing*: share of the samples that "
    f"no step has. *time*: to that of {SHRINK} without kills."
)
GOALS = "to keep wastes what the dead replica had computed, and misses nothing"
PAGE = "data.md"
DRAWN = "wasted"
_LIMIT_S = 300.0


def run(quick: bool) -> list[Row]:
    """A row a number of replicas, steps between kills and way."""
    if quick:
        return _measure((3,), (5,), 10, 0.005)
    return _measure((3, 8), (5, 20, 100), 200, 0.01)


def _measure(replicas: tuple[int, ...], every: tuple[int, ...], steps: int, micro_s: float) -> list[Row]:
    rows: list[Row] = []
    for size in replicas:
        plain_s = 0.0
        for between in (0, *every):
            for way in (SHRINK, KEEP):
                seconds, computed, taken, kills = _train(size, way, between, steps, micro_s)
                plain_s = plain_s or seconds
                missing = 1 - taken / (steps * size * MICRO_BATCHES)
                rows.append(_row(size, between, way, (computed - taken) / max(1, kills), missing, seconds / plain_s))
            again = MICRO_BATCHES * (size - 1) + MICRO_BATCHES / 2
            rows.append(_row(size, between, DISCARD, again if kills else 0.0, 0.0, 1 + kills / steps))
    return rows


def _row(size: int, between: int, way: str, wasted: float, missing: float, to_plain: float) -> Row:
    kills = f"a kill every {between} steps" if between else "no kills"
    found: Row = {"replicas": size, "kills": kills, "way": way, "wasted": wasted, "missing, %": 100 * missing}
    return {**found, "time": to_plain}


def _train(size: int, way: str, between: int, steps: int, micro_s: float) -> tuple[float, int, float, int]:
    """Seconds from the first micro-batch to the last, micro-batches computed, and those in a step; kills."""
    with tempfile.TemporaryDirectory(prefix="ftopt-bench-") as name, coordinator(Path(name), events=True) as url:
        folder = Path(name)
        told = (size, url, name, way, between, steps, micro_s)
        members = [CONTEXT.Process(target=_replica, args=(rank, *told)) for rank in range(size)]
        deadline = time.monotonic() + _LIMIT_S
        try:
            for member in members:
                member.start()
            while any(member.is_alive() or member.exitcode == -signal.SIGKILL for member in members):
                for rank, member in enumerate(members):
                    if member.exitcode == -signal.SIGKILL:
                        members[rank] = CONTEXT.Process(target=_replica, args=(rank, *told))
                        members[rank].start()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not done in {_LIMIT_S:g} s")
                time.sleep(0.01)
            if any(member.exitcode for member in members):
                raise RuntimeError(f"exit codes {[member.exitcode for member in members]}")
        finally:
            for member in members:
                member.kill()
                member.join()
        moments = [float(line) for line in (folder / "computed").read_text().split()]
        members_of = [
            event["data"]["members"] for event in read_lines(folder / "events.jsonl") if event["event"] == "decide"
        ]
        taken = sum(
            MICRO_BATCHES * len(m) if way == SHRINK else sum(w for *_, w, _ in m) / MICRO_BATCH for m in members_of
        )
        return max(moments) - min(moments), len(moments), taken, len(list(folder.glob("killed-*")))


def _replica(rank: int, size: int, url: str, name: str, way: str, between: int, steps: int, micro_s: float) -> None:
    die_with_parent()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    folder, model = Path(name), nn.Linear(4, 1)
    computed = os.open(folder / "computed", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    group = ftopt.connect(
        url, f"r{rank}", policy=ftopt.FaultPolicy(start_replicas=size, dead_after_s=10.0, grace_s=10.0)
    )
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model, ftopt.SyncSGD(), group=group)

    def compute(inputs: torch.Tensor, number: int) -> None:
        step = optimizer.inner_step
        due = between and step % between == between // 2 and rank == step // between % size
        if due and number == MICRO_BATCHES // 2 - 1 and not (folder / f"killed-{step}").exists():
            (folder / f"killed-{step}").touch()
            os.write(computed, f"{time.monotonic()}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(micro_s)
        model(inputs).square().mean().backward()
        os.write(computed, f"{time.monotonic()}\n".encode())

    if way == SHRINK:
        with optimizer:
            for _ in optimizer.steps(steps):
                for number in range(MICRO_BATCHES):
                    compute(torch.randn(MICRO_BATCH, 4), number)
                optimizer.step()
                optimizer.zero_grad()
        return
    batch = size * MICRO_BATCHES * MICRO_BATCH
    data = torch.utils.data.TensorDataset(torch.randn(steps * batch, 4))
    loader = optimizer.loader(data, batch_size=MICRO_BATCH, global_batch=batch, split=MICRO_BATCH, epochs=1)
    with optimizer:
        for micro_batches in loader.global_batches():
            for number, (inputs,) in enumerate(micro_batches):
                compute(inputs, number)
            optimizer.step()
            optimizer.zero_grad()
