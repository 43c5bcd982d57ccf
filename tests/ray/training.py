"""Training functions that Ray's workers run. What they do goes to ``FOLDER/<replica>.jsonl``."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

import ftopt
from ftopt.events import Event
from ftopt.watch.jsonl import read_lines

STEP_S = 0.02
MANY = 20_000


class Told:
    """What a worker tells the test, also as an ``on_event``."""

    def __init__(self, folder: Path) -> None:
        self.replica, self.rank = os.environ["FTOPT_REPLICA"], int(os.environ["RANK"])
        self._file = folder / f"{self.replica}.jsonl"
        self.life = 1 + sum(line["what"] == "begin" and line["rank"] == self.rank for line in read_lines(self._file))
        self.kill_at: str | None = None

    def __call__(self, event: Event) -> None:
        if event.event == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, what: str, **more: Any) -> None:
        """A line."""
        line = {"what": what, "rank": self.rank, "life": self.life, "pid": os.getpid(), **more}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(config: dict[str, Any]) -> str:
    """Up to the step that a file ``stop`` in the folder names, or that the settings do; returns the digest."""
    folder = Path(config["folder"])
    told = Told(folder)
    if told.life == 1 and told.replica == config.get("kill_in_a_round"):
        told.kill_at = "reduce"
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        model = nn.parallel.DistributedDataParallel(model)
    group = ftopt.connect(
        policy=ftopt.FaultPolicy(start_replicas=config["replicas"], on_loss=config.get("on_loss", "go_on")),
        on_event=told,
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=10), group=group)
    checkpoints = ftopt.Checkpoints(folder / "checkpoint", optimizer, every=2)
    with optimizer:
        checkpoints.include()
        told.tell("begin", step=optimizer.start_step, node=ray.get_runtime_context().get_node_id())
        while optimizer.inner_step < _until(folder, config):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.step()
            if optimizer.inner_step % 10 == 0:
                told.tell("step", step=optimizer.inner_step)
            if told.replica == config.get("raises") and optimizer.inner_step == 30:
                raise RuntimeError("a mistake in the loop")
            time.sleep(STEP_S)
        checkpoints.close()
    digest: str = optimizer.digest() if told.rank == 0 else ""
    told.tell(
        "done",
        digest=digest,
        versions=list(optimizer.status.versions),
        local_steps=optimizer.local_steps,
        pending_steps=optimizer.pending_steps,
    )
    return digest


def _until(folder: Path, config: dict[str, Any]) -> int:
    stop = folder / "stop"
    return int(stop.read_text()) if stop.exists() else config.get("steps", MANY)


def alone(config: dict[str, Any]) -> None:
    """Never calls ftopt."""
