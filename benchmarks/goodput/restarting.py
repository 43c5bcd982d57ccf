"""Checkpoint and restart: DDP over Gloo under torchrun's agent, whose ranks come from the fork server.

`torch.distributed.launcher.elastic_launch` is what ``torchrun --max-restarts`` calls; as a function it starts its ranks
from a process that has imported torch, so that imports on two cores are no part of what is measured. A machine that is
removed has a spare in its place at once, and its samples do not count until it is back: the job is restarted as a whole
once a removal, and not a second time for the return.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.speed.restarting import restore, save
from ftopt.watch.jsonl import JsonLines, read_lines
from tests.forkserver import CONTEXT, die_with_parent
from tests.sync.processes.job import tiny_model

_PR_SET_PDEATHSIG = 1
_READY_S = 90.0


def rank(folder: Path, started: float, step_s: float, start_s: float, checkpoint_s: float, every: int) -> None:
    """One rank, until it is ended. ``starts.jsonl`` has a line for each start, ``steps.jsonl`` for each step."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    own = int(os.environ["RANK"])
    lines = JsonLines(folder / "starts.jsonl", started)
    lines.write({"event": "begin", "rank": own, "pid": os.getpid()})
    time.sleep(start_s)
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(tiny_model())
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = restore(folder / "checkpoint.pt", model, inner)
    lines.write({"event": "train", "rank": own, "pid": os.getpid(), "step": step})
    steps = JsonLines(folder / "steps.jsonl", started)
    data = torch.Generator()
    while True:
        x = torch.randn(4, 8, generator=data.manual_seed(step * 100 + own))
        time.sleep(step_s)  # an inner step of known length
        (model(x) - x.flip(1)).square().mean().backward()
        inner.step()
        inner.zero_grad()
        step += 1
        if own == 0:
            steps.write({"step": step})
            if step % every == 0:
                time.sleep(checkpoint_s)  # a checkpoint of known length
                save(folder / "checkpoint.pt", model, inner, step)


def _agent(folder: Path, size: int, arguments: tuple[Any, ...]) -> None:
    die_with_parent()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or restarted ranks find dead ones' addresses in the store
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=size, max_restarts=10_000, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="forkserver", log_line_prefix_template=None,
    )  # fmt: skip
    with (folder / "said.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    elastic_launch(config, rank)(*arguments)


class RestartingJob:
    """The job; ranks are called r0, r1, ... like the machines."""

    def __init__(
        self, folder: Path, size: int, *, step_s: float, start_s: float, checkpoint_s: float, every: int
    ) -> None:
        self.folder, self.started = folder, time.time()
        self.every = every
        self.odd: Counter[str] = Counter()
        self.kills: list[float] = []
        """When, in the job's seconds."""
        arguments = (folder, self.started, step_s, start_s, checkpoint_s, every)
        self._agent = CONTEXT.Process(target=_agent, args=(folder, size, arguments))
        self._agent.start()

    def start(self, name: str) -> None:
        """The agent starts all ranks at once, at the first time and at each restart: a spare is always there."""

    def wait_ready(self) -> None:
        """All train."""
        deadline = time.monotonic() + _READY_S
        while not read_lines(self.folder / "steps.jsonl"):
            if time.monotonic() > deadline:
                said = (self.folder / "said.log").read_text()
                raise TimeoutError(f"DDP does not train after {_READY_S:g} s; it said: {said}")
            time.sleep(0.1)

    def warn(self, name: str) -> None:
        """A notice is of no use."""

    def remove(self, name: str) -> None:
        begun = [x for x in read_lines(self.folder / "starts.jsonl") if f"r{x['rank']}" == name]
        self.kills.append(time.time() - self.started)
        if begun:
            with suppress(ProcessLookupError):
                os.kill(begun[-1]["pid"], signal.SIGKILL)

    def tend(self) -> None:
        if not self._agent.is_alive() and not self.odd:
            self.odd["the agent ended by itself"] += 1

    def close(self) -> None:
        """Ends agent and ranks."""
        self._agent.terminate()
        self._agent.join(10.0)
        self._agent.kill()
        self._agent.join()
